"""Ways to train that once went wrong: nearly dead layers, freezing and thawing, edited weights, unusual gradients."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import pathprox
from networks import Net, assert_on_the_sphere, attached, chain
from pathprox import PathProx, WeightDecay, find_units, local_lipschitz, stationarity

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def data(inputs: int = 6, outputs: int = 3, count: int = 32):
    return torch.randn(count, inputs), torch.randn(count, outputs)


def descend(model, optimizer, xy, steps: int) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(xy[0]) - xy[1]).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-4])
def test_a_nearly_dead_layer_does_not_blow_up_its_chain(size):
    model, xy = chain(6, 8, 7, 8, 3), data()
    with torch.no_grad():
        model[2].weight.mul_(size)
    optimizer, _ = attached(model, xy[0], lambda p: SGD(p, lr=0.01), 1e-4)
    start = descend(model, optimizer, xy, 1)
    assert descend(model, optimizer, xy, 300) < start


@pytest.mark.parametrize("what", ["v", "bias"])
def test_thawing_does_not_change_the_function(what):
    model, xy = chain(6, 8, 7, 8, 3), data()
    optimizer, prox = attached(model, xy[0], lambda p: SGD(p, lr=0.1), 0.01)
    frozen = model[2].weight if what == "v" else model[0].bias
    descend(model, optimizer, xy, 5)
    frozen.requires_grad_(False)
    descend(model, optimizer, xy, 100)
    frozen.requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.0
    before = model(xy[0])
    descend(model, optimizer, xy, 1)
    torch.testing.assert_close(model(xy[0]), before, rtol=1e-4, atol=1e-6)
    assert_on_the_sphere(prox.units)


def test_weights_loaded_after_attaching_keep_their_function():
    model, xy = chain(6, 8, 7, 8, 3), data()
    optimizer, prox = attached(model, xy[0], lambda p: SGD(p, lr=0.0), 0.01)
    other = chain(6, 8, 7, 8, 3)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    model.load_state_dict(other.state_dict())
    descend(model, optimizer, xy, 1)
    torch.testing.assert_close(model(xy[0]), other(xy[0]), rtol=1e-4, atol=1e-5)
    assert_on_the_sphere(prox.units)


def test_gradients_follow_weights_that_were_edited_before_the_step():
    """Loaded weights are folded between backward and step: the step must be that of the folded network."""
    model, xy = chain(6, 8, 3).double(), [t.double() for t in data()]
    twin = copy.deepcopy(model)
    optimizer, _ = attached(model, xy[0], lambda p: SGD(p, lr=0.01), 0.0)
    with torch.no_grad():
        model[0].weight.mul_(2)  # an edit, in place
        twin[0].weight.copy_(model[0].weight)
        twin[0].bias.copy_(model[0].bias)
        twin[2].weight.copy_(model[2].weight)
    optimizer2, _ = attached(twin, xy[0], lambda p: SGD(p, lr=0.01), 0.0)  # folded before the gradient is taken
    descend(model, optimizer, xy, 1)
    descend(twin, optimizer2, xy, 1)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_bias_leaves_w_free_to_find_its_norm():
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(2, 1), nn.Identity(), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            model[0].weight.mul_(0.1 / model[0].weight.norm())
            model[0].bias.fill_(1.0)
            model[2].weight.fill_(0.5)
        model[0].bias.requires_grad_(False)
        x = torch.randn(50, 2)
        xy = x, x @ torch.tensor([[1.0], [0.5]]) + 1
        optimizer, prox = attached(model, x, lambda p: SGD(p, lr=0.1), 0.05)
        descend(model, optimizer, xy, 3000)
        assert gradient(model, prox.units, xy, 0.05) < 1e-3
    finally:
        torch.set_default_dtype(torch.float32)


def gradient(model, units, xy, weight_decay) -> float:
    model.zero_grad()
    (model(xy[0]) - xy[1]).square().mean().backward()
    return stationarity(units, weight_decay)


def test_units_that_start_with_w_zero_wake_up_without_a_jump():
    model = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.Linear(5, 2))
    nn.init.zeros_(model[0].weight)
    x = torch.randn(40, 3)
    xy = x, x[:, :2]
    optimizer, prox = attached(model, x, lambda p: SGD(p, lr=0.03), 1e-3)
    losses = [descend(model, optimizer, xy, 1) for _ in range(300)]
    assert all(b < a + 0.1 for a, b in pairwise(losses))
    assert losses[-1] < 0.1 * losses[0]
    assert ((prox.units.norm(prox.units[0].into) - 1).abs() < 1e-6).any()


def test_adam_does_not_wipe_out_what_had_no_gradient_yet():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.a, self.b = nn.Embedding(100, 8), nn.Linear(8, 200), nn.Linear(200, 3)

        def forward(self, i):
            return self.b(torch.relu(self.a(self.table(i))))

    model, words = Words(), torch.arange(2)
    optimizer, prox = attached(model, words, lambda p: Adam(p, lr=1e-3), 1e-4)
    before = float(model.table.weight[50].detach().norm())
    model(words).square().mean().backward()
    optimizer.step()
    assert float(model.table.weight[50].detach().norm()) > 0.97 * before
    assert prox.units.count_active()[0] > 190


@pytest.mark.parametrize("method", [WeightDecay, pathprox.PathNorm, pathprox.Lasso, pathprox.GroupLasso])
def test_a_maximised_loss_still_has_a_penalty(method):
    model, (x, _) = chain(6, 8, 3), data()
    optimizer = SGD(model.parameters(), lr=0.1, maximize=True)
    method(find_units(model, x[:1]), 0.05).attach(optimizer)
    size = sum(float(p.detach().square().sum()) for p in model.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        (0 * model(x).sum()).backward()
        optimizer.step()
    assert sum(float(p.detach().square().sum()) for p in model.parameters()) < size


def test_w_in_two_layers_is_projected_when_only_one_took_part():
    model = Net(
        lambda self, x: self.c(torch.relu(self.a(x) + self.b(x) if self.both else self.a(x))),
        a=nn.Linear(6, 8),
        b=nn.Linear(6, 8),
        c=nn.Linear(8, 3),
    )
    model.both, xy = True, data()
    optimizer, prox = attached(model, xy[0], lambda p: SGD(p, lr=0.1), 0.01)
    for both in (True, False, True, False):
        model.both = both
        descend(model, optimizer, xy, 1)
        assert_on_the_sphere(prox.units)


def test_thousands_of_equal_inputs_are_measured_well():
    model = chain(5000, 4, 2)
    nn.init.constant_(model[0].weight, 0.01)
    x = torch.randn(3, 5000) / 100
    optimizer, _ = attached(model, x, lambda p: SGD(p, lr=0.01), 1e-3)
    model(x).square().sum().backward()
    optimizer.step()
    assert (model[0].weight.detach().double().norm(dim=1) - 1).abs().max() < 1e-6


def test_a_hook_that_clears_gradients_does_not_silence_it():
    model, xy = chain(6, 16, 3), data()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    prox = PathProx(find_units(model, xy[0][:1]), 10.0).attach(optimizer)
    descend(model, optimizer, xy, 5)
    assert prox.units.count_active() == (0, 16)


def test_freezing_after_attaching_is_respected_by_normalised_weight_decay():
    model, xy = chain(6, 16, 3), data()
    optimizer = SGD(model.parameters(), lr=0.1)
    pathprox.NormalizedWeightDecay(find_units(model, xy[0][:1]), 0.1).attach(optimizer)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    descend(model, optimizer, xy, 3)
    assert torch.equal(model[0].weight, before)


def test_a_learning_rate_of_shape_one():
    model, xy = chain(6, 8, 7, 3), data()
    optimizer, prox = attached(model, xy[0], lambda p: SGD(p, lr=torch.tensor([0.1])), 0.01)
    descend(model, optimizer, xy, 3)
    assert_on_the_sphere(prox.units)


def test_weight_decay_that_comes_with_a_later_group_is_refused():
    model, xy = chain(6, 8, 3), data()
    optimizer = SGD(model[0].parameters(), lr=0.1)
    PathProx(find_units(model, xy[0][:1]), 0.01).attach(optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters()), "weight_decay": 0.5})
    with pytest.raises(ValueError, match=r"already has weight_decay=0\.5"):
        descend(model, optimizer, xy, 1)


def test_sparse_gradients_are_refused_by_rivals_with_a_cure():
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    words = torch.arange(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    WeightDecay(find_units(model, words), 0.1).attach(optimizer)
    model(words).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("beta", [0.5, 0.6, 0.9])
def test_radam_with_a_short_memory(beta):
    model, xy = chain(6, 8, 3), data()
    optimizer, prox = attached(model, xy[0], lambda p: torch.optim.RAdam(p, lr=0.01, betas=(0.9, beta)), 0.01)
    descend(model, optimizer, xy, 20)
    assert_on_the_sphere(prox.units)


def test_stationarity_leaves_out_what_pathprox_leaves_out():
    model = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.Linear(5, 2)).double()
    model[2].weight.requires_grad_(False)
    xy = [t.double() for t in data(3, 2)]
    optimizer, prox = attached(model, xy[0], lambda p: SGD(p, lr=0.1), 0.05)
    descend(model, optimizer, xy, 2000)
    assert gradient(model, prox.units, xy, 0.05) < 1e-5


def test_a_model_with_one_number_a_sample_has_a_lipschitz_constant():
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    norms = local_lipschitz(model, torch.randn(5, 4))
    torch.testing.assert_close(norms, model[0].weight.detach().norm().expand(5))
