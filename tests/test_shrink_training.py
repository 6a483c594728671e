"""Units leave in the middle of training, and training goes on as if nothing had happened."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import pathprox
from networks import Net, attached, batch, chain, numel, train
from pathprox import PathProx, Units, WeightDecay, find_units, shrink, shrink_
from pathprox.dead import find_dead
from pathprox.experiments.data import mnist_subset
from pathprox.experiments.models import MLP


def network() -> nn.Module:
    """Batch norm, a depthwise convolution, PReLU and flattening: all that a cut has to get right."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.PReLU(12),
        nn.Flatten(),
        nn.Linear(12 * 16, 20),
        nn.ReLU(),
        nn.Linear(20, 4),
    ).double()


def silence(units: Units, share: float = 0.4) -> None:
    """Random units with all of their weights at zero: no gradient will ever wake them."""
    for group in units:
        alive = (torch.rand(len(group)) >= share).double()
        for s in group.into + group.bias + group.out:
            s.scale_(units.tensor(s.name).detach(), alive)
    for group, dead in zip(units, find_dead(units, dict(units.model.named_parameters())), strict=True):
        for s in group.into + group.bias + group.out:
            s.scale_(units.tensor(s.name).detach(), (~dead).double())


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 3, 8, 8).double(), torch.randint(0, 4, (16,))


OPTIMIZERS = {
    "SGD": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: Adam(p, lr=1e-3),
    "AdamW amsgrad": lambda p: AdamW(p, lr=1e-3, weight_decay=0, amsgrad=True),
}


@pytest.mark.filterwarnings("ignore:dead units")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in OPTIMIZERS for method in (None, PathProx)),
        ("SGD", pathprox.PathNorm),
        ("Adam", pathprox.NormalizedWeightDecay),
    ],
)
def test_training_goes_on_exactly_as_the_unshrunk_network_would(name, method):
    model, data = network(), images()
    silence(find_units(model, data[0][:2]))
    twin = copy.deepcopy(model)
    losses = []
    for net in (model, twin):
        optimizer = OPTIMIZERS[name](net.parameters())
        units = find_units(net, data[0][:2])
        if method is not None:
            method(units, 1e-3).attach(optimizer)
        schedule = StepLR(optimizer, 7)
        losses.append([])
        for step in range(40):
            losses[-1] += train(net, optimizer, data, 1)
            schedule.step()
            if step in (9, 20) and net is twin:
                shrink_(twin, units, optimizer)
    assert numel(twin) < 0.5 * numel(model)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=1e-12)


def test_units_and_optimizer_describe_the_smaller_model():
    model, data = network(), images()
    units = find_units(model, data[0][:2])
    silence(units)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": list(model.parameters())[1:], "name": "rest"}]
    optimizer = Adam(groups, lr=1e-3)
    train(model, optimizer, data, 3)
    objects = [id(p) for p in model.parameters()]
    removed = shrink_(model, units, optimizer)
    assert removed == sum(8 + 8 + 12 + 20 for _ in range(1)) - sum(map(len, units)) > 0
    assert tuple(units) == tuple(find_units(model, data[0][:2]))
    assert [len(numbers) for numbers in units.kept] == [len(g) for g in units]
    assert [id(p) for p in model.parameters()] == objects
    for p in model.parameters():
        assert p.grad.shape == p.shape == optimizer.state[p]["exp_avg"].shape == optimizer.state[p]["exp_avg_sq"].shape
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1e-3]
    assert optimizer.param_groups[1]["name"] == "rest"
    assert model[3].groups == model[3].in_channels == model[0].out_channels


def test_what_autograd_remembers_of_the_old_shapes_does_no_harm():
    """A loss that is still alive keeps the nodes that gather gradients of the old shapes."""
    model, data = chain(8, 20, 4).double(), batch()
    x = data[0].double()
    units = find_units(model, x[:1])
    silence(units)
    loss = cross_entropy(model(x), data[1])
    loss.backward(retain_graph=True)
    shrink_(model, units)
    cross_entropy(model(x), data[1]).backward()
    assert model[0].weight.grad.shape == model[0].weight.shape
    assert loss.requires_grad


def test_nothing_changes_when_the_optimizer_cannot_follow():
    model, data = chain(8, 20, 4), batch()
    units = find_units(model, data[0][:1])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, data, 2)
    with torch.no_grad():
        model[2].weight[:, :5] = 0
    optimizer.state[model[0].weight]["row"] = torch.ones(20)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=r"SGD keeps 'row' of 0.weight in the shape \(20,\)"):
        shrink_(model, units, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert len(units[0]) == 20


def test_only_settled_units_go_and_what_dies_with_them():
    model = chain(4, 6, 5, 2)
    units = find_units(model, torch.randn(1, 4))
    with torch.no_grad():
        model[2].weight[:, 0] = 0  # dead, but not settled
        model[4].weight[:, :2] = 0
    settled = [torch.zeros(6, dtype=torch.bool), torch.tensor([True, False, False, False, False])]
    assert shrink_(model, units, settled=settled) == 1
    assert [len(g) for g in units] == [6, 4]
    assert units.kept[1].tolist() == [1, 2, 3, 4]
    assert shrink_(model, units) == 2
    assert units.kept[0].tolist() == [1, 2, 3, 4, 5]


def test_channels_last_stays():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    units = find_units(model, torch.randn(1, 3, 8, 8))
    with torch.no_grad():
        model[2].weight[:, :3] = 0
    shrink_(model, units)
    assert model[2].weight.shape == (4, 5, 3, 3)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_pathprox_removes_settled_units_by_itself():
    model, data = chain(8, 64, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.03, shrink_every=20, patience=10)
    sizes = []
    for _ in range(20):
        train(model, optimizer, data, 20)
        sizes.append(model[0].out_features)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(prox.units[0]) < 40
    assert torch.allclose(prox.units.norm(prox.units[0].into), torch.ones(sizes[-1], dtype=torch.float64), atol=1e-6)


def test_pathprox_leaves_multiples_and_goes_on_removing():
    model, data = chain(8, 64, 4), batch()
    options = {"shrink_every": 20, "patience": 10, "multiple_of": 8}
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.03, **options)
    sizes = set()
    for _ in range(20):
        train(model, optimizer, data, 20)
        sizes.add(model[0].out_features)
    assert len(sizes) > 2
    assert all(size % 8 == 0 for size in sizes)
    assert min(sizes) == len(prox.units[0]) <= 40
    with pytest.raises(ValueError, match="multiple_of must be"):
        PathProx(prox.units, 0.03, multiple_of=0)


def test_patience_is_the_number_of_steps_a_unit_has_to_be_dead():
    model, data = chain(8, 16, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 100.0, shrink_every=1, patience=5)
    sizes = []
    for _ in range(6):
        train(model, optimizer, data, 1)
        sizes.append(len(prox.units[0]))
    assert sizes == [16, 16, 16, 16, 1, 1]  # everything dies at once; one unit of a dead layer is spared


def test_a_group_that_cannot_shrink_is_tried_once_and_told():
    def forward(self, x):
        return self.b(torch.relu(self.a(x)).view(-1, 16))

    model, data = Net(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 4)), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 100.0, shrink_every=2, patience=2)
    with pytest.warns(UserWarning, match=r"dead units of a -> b were kept: .*test_shrink_training\.py"):
        train(model, optimizer, data, 3)
    train(model, optimizer, data, 10)  # warnings are errors
    assert len(prox.units[0]) == 16


def test_training_can_be_resumed_from_the_smaller_network(tmp_path):
    def start():
        torch.manual_seed(0)
        return chain(8, 64, 4).double()

    model, (x, y) = start(), batch()
    data = x.double(), y
    options = {"shrink_every": 10, "patience": 5}
    make = lambda p: SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    optimizer, prox = attached(model, data[0], make, 0.03, **options)
    train(model, optimizer, data, 155)
    pathprox.save(model, tmp_path / "model.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "prox": prox.state_dict()}, tmp_path / "rest.pt")
    losses = train(model, optimizer, data, 60)
    again = pathprox.load(start, tmp_path / "model.safetensors")
    optimizer, other = attached(again, data[0], make, 0.03, **options)
    rest = torch.load(tmp_path / "rest.pt", weights_only=True)
    optimizer.load_state_dict(rest["optimizer"])
    other.load_state_dict(rest["prox"])
    assert train(again, optimizer, data, 60) == losses
    assert len(other.units[0]) == len(prox.units[0]) < 64


def test_bad_settings_are_refused():
    units = find_units(chain(4, 6, 2), torch.randn(1, 4))
    with pytest.raises(ValueError, match="shrink_every must be a number of steps"):
        PathProx(units, 0.1, shrink_every=0)
    with pytest.raises(ValueError, match="counted only with shrink_every"):
        PathProx(units, 0.1).remove_settled()
    with pytest.raises(ValueError, match="found in another model"):
        shrink_(chain(4, 6, 2), units)


def test_several_processes_are_refused(monkeypatch):
    model = chain(4, 6, 2)
    prox = PathProx(find_units(model, torch.randn(1, 4)), 0.1, shrink_every=5)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"wrap the model in DDP again"):
        prox.attach(SGD(model.parameters(), lr=0.1))


def test_removable_units_get_a_group_lasso_on_v():
    model, data = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)), batch()
    units = find_units(model, data[0][:1], homogeneous_only=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    PathProx(units, 0.03).attach(optimizer)
    w = units.norm(units[0].into)
    train(model, optimizer, data, 1)
    assert not torch.allclose(units.norm(units[0].into), torch.ones_like(w), atol=0.1)  # not projected
    train(model, optimizer, data, 400)
    alive, count = units.count_active()
    assert alive < 0.5 * count
    small = shrink(model, units)
    assert small[0].out_features == alive
    torch.testing.assert_close(small(data[0]), model(data[0]), rtol=1e-5, atol=1e-5)


def test_a_group_lasso_ends_at_a_stationary_point():
    model, (x, y) = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double(), batch(6, 3, 40)
    units = find_units(model, x[:1].double(), homogeneous_only=False)
    optimizer = SGD(model.parameters(), lr=0.3)
    PathProx(units, 0.05).attach(optimizer)
    train(model, optimizer, (x.double(), y), 4000)
    optimizer.zero_grad()
    cross_entropy(model(x.double()), y).backward()
    assert pathprox.stationarity(units, 0.05) < 1e-8


def test_on_real_digits_half_of_the_network_goes_and_the_accuracy_stays():
    """About 600,000 parameters, 1000 training images; the rival has the same start, batches and weight decay."""
    data = mnist_subset()
    seen = {}
    for method, options in ((WeightDecay, {}), (PathProx, {"shrink_every": 50, "patience": 20})):
        torch.manual_seed(0)
        model = MLP(3, 300, factorized=True)
        full = numel(model)
        optimizer = SGD(model.parameters(), lr=0.2)
        method(find_units(model, data["train"].images[:1]), 6e-3, **options).attach(optimizer)
        schedule = CosineAnnealingLR(optimizer, 1500)
        for _ in range(1500):
            some = torch.randint(0, 1000, (100,))
            train(model, optimizer, (data["train"].images[some], data["train"].labels[some]), 1)
            schedule.step()
        right = sum(int((model(s.images).argmax(1) == s.labels).sum()) for s in (data["val"], data["test"]))
        seen[method] = right / 3000, numel(model) / full
    assert seen[PathProx][1] <= 0.5
    assert seen[PathProx][0] >= seen[WeightDecay][0] - 0.01


def test_removing_what_said_nothing_does_not_make_the_next_step_jump():
    """Columns that listened to a silent unit count in |w|; without them w has to be brought to norm 1 again."""
    model, data = chain(8, 12, 10, 9, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=1e-9), 1e-9)
    with torch.no_grad():
        model[2].weight[:4], model[2].bias[:4] = 0, 0
    before = model(data[0])
    shrink_(model, prox.units, optimizer)
    train(model, optimizer, data, 2)
    assert model[2].out_features == 6
    torch.testing.assert_close(model(data[0]), before, rtol=1e-5, atol=1e-5)
