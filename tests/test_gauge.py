"""w held at a norm that follows the unit's strength: the same function, and strong units weaken sooner."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import optim

import pathprox
from networks import attached, batch, chain, strong, train
from pathprox.experiments.models import build
from pathprox.held import REGAUGE
from test_fast_step import NETWORKS, OPTIMIZERS, assert_alike, data_for, twins


def wanted(units: pathprox.Units, group: pathprox.UnitGroup, gauge: float) -> torch.Tensor:
    return (gauge * units.norm(group.into) * units.norm(group.out)).sqrt().clamp_min(1)


@pytest.mark.parametrize("make", ["SGD", "momentum", "AdamW"])
def test_choosing_norms_anew_keeps_the_function(make):
    model, data = strong(8, 16, 12, 10, 4), data_for("")
    before = model(data[0]).detach()
    optimizer, prox = attached(model, data[0], OPTIMIZERS[make], gauge=4)
    torch.testing.assert_close(model(data[0]), before)
    train(model, optimizer, data, REGAUGE + 7)
    before = model(data[0]).detach()
    prox.regauge()
    torch.testing.assert_close(model(data[0]), before)
    for group in prox.units.couplings:
        norm = prox.units.norm(group.into)
        assert norm.max() > 1.5
        torch.testing.assert_close(norm, wanted(prox.units, group, 4))


def test_momentum_and_gradients_follow_their_weights():
    model, data = strong(8, 16, 4), data_for("")
    optimizer, prox = attached(model, data[0], OPTIMIZERS["momentum"], gauge=4)
    train(model, optimizer, data, 7)
    weight = model[0].weight
    before = [x.detach().clone() for x in (weight, weight.grad, optimizer.state[weight]["momentum_buffer"])]
    prox.regauge()
    factor = weight.norm(dim=1, keepdim=True) / before[0].norm(dim=1, keepdim=True)
    assert (factor - 1).abs().max() > 1e-3
    torch.testing.assert_close(weight.grad, before[1] / factor)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], before[2] / factor)


@pytest.mark.parametrize("name", ["a chain", "VGG, channels last", "grouped", "concatenation", "residual"])
@pytest.mark.parametrize("make", ["SGD", "momentum"])
def test_the_fast_path_follows(name, make):
    data = data_for(name)
    pair = twins(NETWORKS[name]().double(), data, OPTIMIZERS[make], 0.02, gauge=6)
    for model, optimizer, _ in pair:
        train(model, optimizer, data, 2 * REGAUGE + 5)
    assert_alike(*pair)
    held = [float(pair[0][2].units.norm(g.into).max()) for g in pair[0][2].units.couplings]
    assert max(held) > 1.01


def test_the_objective_falls_sooner_where_units_are_strong():
    """With |w| = 1 strong units weaken more slowly than by weight decay, with gauge=4 faster."""
    x = torch.randn(64, 8)
    data = x, (x[:, :2] > 0).long() @ torch.tensor([1, 2])
    found = {}
    for name, make in {
        "weight decay": pathprox.WeightDecay,
        "1": pathprox.PathProx,
        "4": partial(pathprox.PathProx, gauge=4),
    }.items():
        torch.manual_seed(0)
        model = strong(8, 40, 4, by=5).float()
        optimizer, units = optim.SGD(model.parameters(), lr=0.05), pathprox.find_units(model, x[:1])
        make(units, 0.01).attach(optimizer)
        found[name] = pathprox.objective(units, train(model, optimizer, data, 600)[-1], 0.01).balanced
    assert found["4"] < 0.9 * found["weight decay"] < 0.9 * found["1"]


@pytest.mark.slow
@pytest.mark.parametrize(("gauge", "lr", "bears"), [(0, 0.1, True), (4, 0.1, False), (4, 0.05, False), (4, 0.03, True)])
def test_strong_units_bear_a_lower_learning_rate_with_a_gauge(gauge, lr, bears):
    """Of docs/optimizers.md: v is smaller then, and only w is held."""
    model, x, y = build("VGG19"), torch.randn(20, 32, 3, 32, 32), torch.randint(10, (20, 32))
    optimizer, _ = attached(model, x[0, :1], lambda p: optim.SGD(p, lr=lr), 1e-3, gauge=gauge)
    with nullcontext() if bears else pytest.raises(FloatingPointError, match="Lower the learning rate"):
        for data in zip(x, y, strict=True):
            train(model, optimizer, data, 1)


def test_weak_units_are_held_at_one():
    data = data_for("")
    pair = []
    for gauge in (0, 4):
        torch.manual_seed(0)
        model = strong(8, 16, 4, by=0.1)
        optimizer, prox = attached(model, data[0], OPTIMIZERS["SGD"], gauge=gauge)
        train(model, optimizer, data, 2)
        pair.append((model, prox))
    for a, b in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_training_goes_on_from_a_saved_state():
    data = data_for("")
    model = strong(8, 16, 12, 4)
    optimizer, prox = attached(model, data[0], OPTIMIZERS["momentum"], gauge=4)
    train(model, optimizer, data, REGAUGE - 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), prox.state_dict()))
    train(model, optimizer, data, REGAUGE)
    other = strong(8, 16, 12, 4)
    other.load_state_dict(saved[0])
    again, resumed = attached(other, data[0], OPTIMIZERS["momentum"], gauge=4)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(other, again, data, REGAUGE)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_units_that_leave_and_frozen_weights():
    model, data = strong(8, 40, 20, 4), data_for("")
    optimizer, _ = attached(model, data[0], OPTIMIZERS["momentum"], 0.1, gauge=4, shrink_every=REGAUGE, patience=5)
    train(model, optimizer, data, 10 * REGAUGE)
    assert model[0].out_features < 40
    model[2].requires_grad_(False)
    train(model, optimizer, data, 2 * REGAUGE)
    frozen = model[2].weight.detach().clone()
    train(model, optimizer, data, 2 * REGAUGE)
    assert torch.equal(model[2].weight, frozen)


def test_a_negative_gauge_is_refused():
    model, data = chain(8, 12, 4), batch()
    with pytest.raises(ValueError, match="gauge must not be negative, got -1"):
        pathprox.PathProx(pathprox.find_units(model, data[0][:1]), 0.01, gauge=-1)
