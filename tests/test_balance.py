"""Rescalings keep the function, and reach what they promise; Theorems 1 and 2 of the paper, numerically."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.nn.functional import cross_entropy

import pathprox
from networks import attached, batch, chain, linears, train
from pathprox import balance_, find_units, objective
from pathprox.experiments.models import MLP, VGG

LEVELS = ("units", "layers", "network")


def squares(model: nn.Module) -> float:
    return sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.dim() > 1)


class Residual(nn.Module):
    """A stream with blocks around it: the stream's own units meet themselves."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 6, 3, padding=1)) for _ in range(2)
        )
        self.mix = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        x = x + self.mix(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (MLP(3, 30, factorized=True, inputs=8), (8,)),
        (MLP(6, 30, inputs=8), (8,)),
        (VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M")), (3, 32, 32)),
        (VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M"), batch_norm=True), (3, 32, 32)),
        (Residual(), (3, 8, 8)),
    ],
    ids=["factorized", "mlp", "vgg", "vgg-bn", "residual"],
)
def test_balancing_keeps_the_function(model, shape, level):
    model = copy.deepcopy(model).eval()
    x = torch.randn(16, *shape)
    units = find_units(model, x[:2])
    with torch.no_grad():  # far from balanced, with biases
        for i, p in enumerate(model.parameters()):
            p.mul_(1.5 if i % 3 else 0.7).add_(0.02 * torch.randn_like(p))
        before, size = model(x), squares(model)
        balance_(units, level)
        after = model(x)
    assert (after - before).abs().max() < 1e-5 * before.abs().max()
    double = copy.deepcopy(model).double()
    doubled = pathprox.Units(double, units.groups, units._couplings, units._chains)
    with torch.no_grad():
        before = double(x.double())
        balance_(doubled, level)
        assert (double(x.double()) - before).abs().max() < 1e-6 * before.abs().max()
    if level != "layers":
        assert squares(model) < size


def test_unit_balance_makes_the_norms_equal():
    model = chain(8, 20, 16, 12, 4)
    units = find_units(model, torch.randn(1, 8))
    balance_(units, "units")
    for group in units.couplings:
        torch.testing.assert_close(units.norm(group.into), units.norm(group.out))


def test_layer_balance_makes_the_totals_equal():
    model = chain(8, 20, 16, 12, 10, 9, 4)
    units = find_units(model, torch.randn(1, 8))
    balance_(units, "layers")
    totals = [float((units.norm(g.into) * units.norm(g.out)).sum()) for g in units.couplings]
    assert max(totals) / min(totals) - 1 < 1e-5


def test_network_balance_is_the_minimum_over_all_rescalings():
    """Against a general minimiser over the logarithms of all factors."""
    model = chain(3, 4, 5, 2).double()
    units = find_units(model, torch.randn(1, 3))
    weights = [layer.weight.detach() for layer in linears(model)]

    def value(logs):
        a, b = torch.from_numpy(logs[:4]).exp(), torch.from_numpy(logs[4:]).exp()
        first, second, third = weights
        return float(
            (first * a[:, None]).square().sum() + (second * b[:, None] / a).square().sum() + (third / b).square().sum()
        )

    least = minimize(value, torch.zeros(9, dtype=torch.float64).numpy(), method="BFGS", options={"gtol": 1e-10}).fun
    balance_(units, "network")
    assert squares(model) == pytest.approx(least, rel=1e-8)


def test_network_balance_of_a_stream_that_meets_itself_is_stationary():
    model = Residual().double()
    units = find_units(model, torch.randn(1, 3, 8, 8))
    assert any(group.meets_itself for group in units)
    balance_(units, "network")
    size = squares(model)
    for group in units:
        for i in range(len(group)):
            for a in (0.999, 1.001):
                factor = torch.ones(len(group), dtype=torch.float64)
                factor[i] = a
                for slices, f in ((group.into, factor), (group.out, 1 / factor)):
                    for s in slices:
                        s.scale_(units.tensor(s.name).detach(), f)
                assert squares(model) > size
                for slices, f in ((group.into, 1 / factor), (group.out, factor)):
                    for s in slices:
                        s.scale_(units.tensor(s.name).detach(), f)


def test_dead_units_weigh_nothing_once_balanced():
    model = chain(8, 20, 4)
    with torch.no_grad():
        model[2].weight[:, :5] = 0
        model[0].weight[5:9] = 0
        model[0].bias[5:8] = 0  # unit 8 is a constant: its bias is not zero
    x = torch.randn(16, 8)
    before = model(x)
    units = find_units(model, x[:1])
    balance_(units)
    torch.testing.assert_close(model(x), before)
    assert model[0].weight[:5].abs().max() == 0
    assert model[2].weight[:, 5:8].abs().max() == 0
    assert model[2].weight[:, 8].norm() > 0


def test_a_chain_with_a_dead_coupling_is_left_alone():
    model = chain(8, 12, 10, 9, 4)
    with torch.no_grad():
        model[2].weight.zero_()
    before = copy.deepcopy(model.state_dict())
    balance_(find_units(model, torch.randn(1, 8)), "layers")
    torch.testing.assert_close(model.state_dict(), before)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'units', 'layers' or 'network'"):
        balance_(find_units(chain(8, 4, 2), torch.randn(1, 8)), "all")


sizes = st.lists(st.integers(2, 6), min_size=3, max_size=6)


@given(sizes, st.integers(0, 10**6))
@settings(max_examples=15)
def test_theorem_1_the_smallest_representation_is_balanced(widths, seed):
    """At the least sum of squares, |w| = |v| in every unit of every layer, not only of the couplings."""
    torch.manual_seed(seed)
    model = chain(*widths).double()
    units = find_units(model, torch.randn(1, widths[0]))
    balance_(units, "network")
    for group in units:
        torch.testing.assert_close(units.norm(group.into), units.norm(group.out), rtol=1e-6, atol=1e-9)


@given(sizes, st.integers(0, 10**6), st.floats(1e-4, 1))
@settings(max_examples=15)
def test_theorem_2_both_objectives_meet_at_balanced_points(widths, seed, weight_decay):
    """F >= F balanced by units = G >= F balanced over the network, and F = G once balanced."""
    torch.manual_seed(seed)
    model = chain(*widths).double()
    units = find_units(model, torch.randn(1, widths[0]))
    value = objective(units, 0.7, weight_decay)
    assert value.weight_decay >= value.path_norm - 1e-12
    assert value.unit_balanced == pytest.approx(value.path_norm, rel=1e-9)
    assert value.balanced <= value.unit_balanced + 1e-12
    balance_(units, "units")
    balanced = objective(units, 0.7, weight_decay)
    assert balanced.weight_decay == pytest.approx(balanced.path_norm, rel=1e-9)
    assert balanced.path_norm == pytest.approx(value.path_norm, rel=1e-9)
    balance_(units, "network")
    assert objective(units, 0.7, weight_decay).weight_decay == pytest.approx(value.balanced, rel=1e-8)


def test_objectives_count_what_they_say():
    model = chain(8, 12, 10, 4)
    units = find_units(model, torch.randn(1, 8))
    value = objective(units, torch.tensor(0.5), 0.2)
    w, v, other = (layer.weight.detach().double() for layer in linears(model))
    assert value.weight_decay == pytest.approx(0.5 + 0.1 * squares(model))
    path = (w.norm(dim=1) * v.norm(dim=0)).sum()
    assert value.path_norm == pytest.approx(0.5 + 0.2 * float(path + other.square().sum() / 2), rel=1e-6)


def test_stationarity_is_the_norm_of_the_gradient_where_g_is_smooth():
    model = chain(8, 12, 10, 4).double()
    x, y = batch()
    units = find_units(model, x[:1])
    loss = cross_entropy(model(x.double()), y)
    loss.backward()
    mine = pathprox.stationarity(units, 0.1)
    w, v, other = (layer.weight for layer in linears(model))
    whole = cross_entropy(model(x.double()), y)
    whole = whole + 0.1 * ((w.norm(dim=1) * v.norm(dim=0)).sum() + other.square().sum() / 2)
    grads = torch.autograd.grad(whole, list(model.parameters()))
    assert mine == pytest.approx(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))


def test_stationarity_forgives_a_dead_unit_up_to_the_penalty():
    model = chain(8, 12, 4).double()
    with torch.no_grad():
        model[2].weight[:, 0] = 0
    units = find_units(model, torch.randn(1, 8))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[2].weight.grad[:, 0] = 0.1 * model[0].weight[0].norm() / 2  # a vector of length 0.1 |w|: just inside
    inside = pathprox.stationarity(units, 0.1)
    model[2].weight.grad[:, 0] *= 3
    assert pathprox.stationarity(units, 0.1) > inside
    model[2].weight.grad[:, 0] = 0
    assert pathprox.stationarity(units, 0.1) == pytest.approx(inside)


def test_training_brings_the_balanced_objective_down():
    model, data = chain(8, 30, 20, 20, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: torch.optim.SGD(p, lr=0.1), 1e-2)
    first = objective(prox.units, train(model, optimizer, data, 1)[0], 1e-2).balanced
    last = objective(prox.units, train(model, optimizer, data, 300)[-1], 1e-2).balanced
    assert last < 0.8 * first
