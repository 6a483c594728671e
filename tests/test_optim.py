"""PathProx does Algorithm 1, and leaves everything around it as it was."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pathprox
from networks import assert_balanced, assert_on_the_sphere, attached, batch, chain, linears, train
from pathprox import PathProx, find_units
from pathprox.experiments.models import MLP, VGG
from reference import ReferencePathProx

SGD = torch.optim.SGD


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("sizes", [(8, 16, 4), (8, 12, 10, 4), (8, 12, 10, 9, 4), (8, 12, 10, 9, 8, 7, 4)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("balance", [True, False])
def test_a_hundred_steps_agree_with_the_slow_twin(sizes, momentum, balance):
    model = chain(*sizes).double()
    twin = copy.deepcopy(model)
    x, y = batch()
    x = x.double()
    lr = 0.05 * (1 - momentum)
    optimizer, _ = attached(model, x, lambda p: SGD(p, lr=lr, momentum=momentum), 0.1, balance=balance)
    reference = ReferencePathProx(linears(twin), lr, 0.1, momentum, balance)
    for _ in range(100):
        train(model, optimizer, (x, y), 1)
        twin.zero_grad()
        cross_entropy(twin(x), y).backward()
        reference.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    dead = linears(model)[1].weight.norm(dim=0) == 0
    assert torch.equal(dead, linears(twin)[1].weight.norm(dim=0) == 0)
    assert dead.any()  # the comparison covers exact zeros


@pytest.mark.parametrize("model", [MLP(3, 40, factorized=True, inputs=8, classes=4), MLP(6, 40, inputs=8, classes=4)])
def test_after_every_step_w_is_on_the_sphere_and_the_layers_are_balanced(model):
    data = batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9), 1e-3)
    for _ in range(50):
        train(model, optimizer, data, 1)
        assert_on_the_sphere(prox.units)
        assert_balanced(prox.units)


def test_convolutions_are_held_and_balanced_too():
    model = VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M"))
    data = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    before = model(data[0])
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.01), 1e-3)
    torch.testing.assert_close(model(data[0]), before, rtol=1e-4, atol=1e-5)
    for _ in range(5):
        train(model, optimizer, data, 1)
        assert_on_the_sphere(prox.units)
        assert_balanced(prox.units)


def test_attaching_does_not_change_the_function():
    model = chain(8, 30, 20, 20, 4)
    x, _ = batch()
    before = model(x)
    _, prox = attached(model, x, lambda p: SGD(p, lr=0.1))
    assert_on_the_sphere(prox.units)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)


def test_attaching_in_mid_training_carries_momentum():
    """Without its momentum following the fold, the first step would go elsewhere."""
    x, y = batch()
    x = x.double()
    plain = chain(8, 16, 4).double()
    optimizer = SGD(plain.parameters(), lr=0.01, momentum=0.9)
    train(plain, optimizer, (x, y), 20)
    units = find_units(plain, x[:1])
    weight, state = plain[2].weight, optimizer.state[plain[2].weight]["momentum_buffer"].clone()
    scale = plain[0].weight.norm(dim=1).detach().clone()
    PathProx(units, 0.0).attach(optimizer)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], state / scale)


def test_balancing_carries_momentum_and_second_moments():
    x, y = batch()
    for make in (lambda p: SGD(p, lr=0.01, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)):
        model = chain(8, 16, 12, 10, 4)
        optimizer = make(model.parameters())
        train(model, optimizer, (x, y), 5)
        old = {n: (p.detach().clone(), copy.deepcopy(optimizer.state[p])) for n, p in model.named_parameters()}
        pathprox.balance_(find_units(model, x[:1]), "layers", optimizer)
        factor = float(model[2].weight.detach()[0, 0] / old["2.weight"][0][0, 0])
        assert abs(factor - 1) > 0.01
        for key, power in {"momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2}.items():
            if key in optimizer.state[model[2].weight]:
                now = optimizer.state[model[2].weight][key]
                torch.testing.assert_close(now, old["2.weight"][1][key] * factor**power, rtol=1e-4, atol=1e-9)


STATIONARY = {
    "SGD": (lambda p: SGD(p, lr=0.2), 1.0, {}),
    "momentum": (lambda p: SGD(p, lr=0.05, momentum=0.9), 1.0, {}),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01), 0.999, {}),
    "Adam, biases in w": (lambda p: torch.optim.Adam(p, lr=0.01), 0.999, {"bias": True}),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_fixed_points_are_stationary_points_of_the_objective(name):
    """With w free as well: a Euclidean projection after an Adam step would stop elsewhere.

    The activation is the identity, for at the kink of a ReLU there is no gradient to measure a distance by.
    """
    make, decay, options = STATIONARY[name]
    model = nn.Sequential(nn.Linear(5, 12), nn.Identity(), nn.Linear(12, 3)).double()
    x, y = torch.randn(40, 5).double(), torch.randint(0, 3, (40,))
    optimizer, prox = attached(model, x, make, 0.02, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    train(model, optimizer, (x, y), 1)
    start = gradient_distance(model, prox.units, x, y, **options)
    for _ in range(4000):
        train(model, optimizer, (x, y), 1)
        schedule.step()
    assert gradient_distance(model, prox.units, x, y, **options) < 1e-4 * start
    assert 0 < prox.units.count_active()[0] < 12


def gradient_distance(model, units, x, y, **options):
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    return pathprox.stationarity(units, 0.02, **options)


def test_thresholds_follow_the_learning_rate_of_the_group_that_owns_v():
    """w in one group, v in another with lr 0: v must not be thresholded."""
    model = chain(8, 16, 4)
    data = batch()
    units = find_units(model, data[0][:1])
    optimizer = SGD([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.0}])
    PathProx(units, 10.0).attach(optimizer)
    before = model[2].weight.detach().clone()
    train(model, optimizer, data, 3)
    assert torch.equal(model[2].weight, before)
    optimizer.param_groups[1]["lr"] = 0.1
    train(model, optimizer, data, 3)
    assert model[2].weight.abs().max() == 0


def test_a_v_in_two_groups_with_two_rates_is_thresholded_in_both():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 2)

        def forward(self, x):
            x = torch.relu(self.trunk(x))
            return torch.cat([self.left(x), self.right(x)], 1)

    model, data = Fork(), batch(classes=5)
    units = find_units(model, data[0][:1])
    assert [g.layers_out for g in units.couplings] == [("left", "right")]
    optimizer = SGD(
        [
            {"params": [*model.trunk.parameters(), *model.left.parameters()]},
            {"params": model.right.parameters(), "lr": 0.01},
        ],
        lr=0.1,
    )
    PathProx(units, 0.05).attach(optimizer)
    train(model, optimizer, data, 300)
    left, right = model.left.weight.norm(dim=0) == 0, model.right.weight.norm(dim=0) == 0
    assert left.any()
    assert torch.equal(left, right)  # a unit dies as a whole


@pytest.mark.parametrize("frozen", ["0", "0.bias", "2.bias", "4", "6"])
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)])
def test_frozen_parameters_are_never_changed(frozen, make):
    model = chain(8, 16, 12, 10, 4)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = batch()
    optimizer, prox = attached(model, data[0], make)
    out = model(data[0])
    train(model, optimizer, data, 20)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not name.startswith(frozen)}
    assert out.isfinite().all()
    assert prox.units.count_active()[1] == 26


def test_a_frozen_w_is_penalised_by_its_own_norm():
    model = chain(8, 16, 4)
    model[0].requires_grad_(False)
    model[0].weight.mul_(torch.linspace(0.1, 3, 16)[:, None])
    data = batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.1)
    norm = model[0].weight.norm(dim=1)
    before = model[2].weight.detach().clone()
    train(model, optimizer, data, 1)
    moved = before - 0.1 * model[2].weight.grad
    expected = pathprox.prox.soft_threshold(moved, 0.1 * 0.1 * norm, dim=0)
    torch.testing.assert_close(model[2].weight.detach(), expected)


def test_a_frozen_v_leaves_its_unit_out():
    model = chain(8, 16, 4)
    model[2].weight.requires_grad_(False)
    data = batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.1)
    before = model[0].weight.detach().clone()
    train(model, optimizer, data, 1)
    expected = (before - 0.1 * model[0].weight.grad) / (1 + 0.1 * 0.1)
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_a_layer_thawed_in_mid_training_joins_without_changing_the_function():
    model = chain(8, 16, 12, 10, 4)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    data = batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=1e-4), 1e-6)
    train(model, optimizer, data, 3)
    model.requires_grad_(True)
    before = model(data[0])
    train(model, optimizer, data, 1)
    torch.testing.assert_close(model(data[0]), before, rtol=1e-3, atol=1e-3)
    assert_on_the_sphere(prox.units)


def test_biases_can_be_part_of_w():
    model = chain(8, 16, 12, 10, 4)
    data = batch()
    before = model(data[0])
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9), 1e-3, bias=True)
    torch.testing.assert_close(model(data[0]), before, rtol=1e-4, atol=1e-6)
    train(model, optimizer, data, 30)
    for group in prox.units.couplings:
        assert (prox.units.norm(group.into + group.bias) - 1).abs().max() < 1e-6


def test_other_weights_get_ordinary_weight_decay():
    model = chain(8, 16, 12, 4)
    data = batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.5)
    assert [s.name for s in prox.units.others()] == ["4.weight"]
    before = model[4].weight.detach().clone()
    train(model, optimizer, data, 1)
    torch.testing.assert_close(model[4].weight.detach(), (before - 0.1 * model[4].weight.grad) / 1.05)


def test_dead_units_stay_dead_however_small_the_step():
    model = chain(8, 16, 4)
    data = batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 5.0)
    train(model, optimizer, data, 20)
    assert prox.units.count_active() == (0, 16)
    optimizer.param_groups[0]["lr"] = 1e-9
    train(model, optimizer, data, 5)
    assert prox.units.count_active() == (0, 16)


def test_state_dicts_resume_bit_for_bit(tmp_path):
    for make in (lambda p: SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)):
        torch.manual_seed(1)
        model, data = chain(8, 16, 12, 10, 4), batch()
        optimizer, prox = attached(model, data[0], make, 0.005)
        train(model, optimizer, data, 10)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "prox": prox.state_dict()},
            tmp_path / "x.pt",
        )
        train(model, optimizer, data, 10)

        saved = torch.load(tmp_path / "x.pt", weights_only=True)
        again = chain(8, 16, 12, 10, 4)
        optimizer2, prox2 = attached(again, data[0], make, 0.5)
        again.load_state_dict(saved["model"])
        optimizer2.load_state_dict(saved["optimizer"])
        prox2.load_state_dict(saved["prox"])
        train(again, optimizer2, data, 10)
        assert same_weights(model, again)


def test_attaching_to_a_loaded_model_changes_no_bit_of_it():
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.05), 0.005)
    train(model, optimizer, data, 10)
    again = copy.deepcopy(model)
    attached(again, data[0], lambda p: SGD(p, lr=0.05), 0.005)
    assert same_weights(model, again)


def test_state_of_another_model_is_refused():
    _, small = attached(chain(8, 16, 4), batch()[0], lambda p: SGD(p, lr=0.1))
    _, large = attached(chain(8, 20, 4), batch()[0], lambda p: SGD(p, lr=0.1))
    with pytest.raises(ValueError, match="20 units"):
        small.load_state_dict(large.state_dict())
    with pytest.raises(ValueError, match="WeightDecay"):
        small.load_state_dict(pathprox.WeightDecay(small.units, 0.1).state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_train_on_by_themselves(clone):
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.05, momentum=0.9), 0.005)
    train(model, optimizer, data, 5)
    other = clone(prox)
    before = copy.deepcopy(model)
    train(other.units.model, other.optimizer, data, 10)
    assert same_weights(model, before)
    train(model, optimizer, data, 10)
    assert same_weights(model, other.units.model)
    assert_on_the_sphere(other.units)


def test_detaching_ends_it():
    model, data = chain(8, 16, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1))
    prox.detach()
    twin, plain = copy.deepcopy(model), None
    plain = SGD(twin.parameters(), lr=0.1)
    train(model, optimizer, data, 3)
    train(twin, plain, data, 3)
    assert same_weights(model, twin)


def test_saved_state_fits_a_buffer():
    _, prox = attached(chain(8, 16, 4), batch()[0], lambda p: SGD(p, lr=0.1))
    file = io.BytesIO()
    torch.save(prox.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["weight_decay"] == 0.01
