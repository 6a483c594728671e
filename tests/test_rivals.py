"""The methods the paper compares with: each adds exactly its penalty's gradient."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import pathprox
from networks import batch, chain, linears, train
from pathprox import GroupLasso, Lasso, NormalizedWeightDecay, PathNorm, WeightDecay, find_units

PENALTIES = {
    WeightDecay: lambda w, v, other: (w.square().sum() + v.square().sum() + other.square().sum()) / 2,
    PathNorm: lambda w, v, other: (w.norm(dim=1) * v.norm(dim=0)).sum() + other.square().sum() / 2,
    Lasso: lambda w, v, other: w.abs().sum() + v.abs().sum() + other.abs().sum(),
    GroupLasso: lambda w, v, other: w.norm(dim=1).sum() + v.norm(dim=1).sum() + other.norm(dim=1).sum(),
}


@pytest.mark.parametrize("method", PENALTIES)
def test_it_is_gradient_descent_on_its_objective(method):
    model, (x, y) = chain(8, 12, 10, 4).double(), batch()
    x = x.double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method(find_units(model, x[:1]), 0.03).attach(optimizer)
    train(model, optimizer, (x, y), 20)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        penalty = PENALTIES[method](*(layer.weight for layer in linears(twin)))
        (cross_entropy(twin(x), y) + 0.03 * penalty).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_weight_decay_is_torchs_own():
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        model, data = chain(8, 12, 10, 4, bias=False).double(), (batch()[0].double(), batch()[1])
        twin = copy.deepcopy(model)
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0)
        WeightDecay(find_units(model, data[0][:1]), 0.1).attach(optimizer)
        train(model, optimizer, data, 10)
        train(twin, make(twin.parameters(), lr=0.01, weight_decay=0.1), data, 10)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_normalised_weight_decay_keeps_w_on_the_sphere_and_starts_as_the_same_function():
    model, data = chain(8, 12, 10, 9, 4), batch()
    before = model(data[0])
    units = find_units(model, data[0][:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    NormalizedWeightDecay(units, 0.1).attach(optimizer)
    torch.testing.assert_close(model(data[0]), before)
    for _ in range(10):
        train(model, optimizer, data, 1)
        for group in units.couplings:
            assert (units.norm(group.into) - 1).abs().max() < 1e-6
    assert units.count_active() == (21, 21)


def test_rivals_leave_frozen_parameters_alone():
    for method in (*PENALTIES, NormalizedWeightDecay):
        model, data = chain(8, 12, 10, 9, 4), batch()
        model[2].requires_grad_(False)
        before = model[2].weight.clone()
        units = find_units(model, data[0][:1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method(units, 0.1).attach(optimizer)
        train(model, optimizer, data, 5)
        assert torch.equal(model[2].weight, before), method


def test_none_of_them_reaches_an_exact_zero():
    for method in PENALTIES:
        model, data = chain(8, 12, 4), batch()
        units = find_units(model, data[0][:1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method(units, 0.05).attach(optimizer)
        train(model, optimizer, data, 200)
        assert units.count_active() == (12, 12), method
    assert pathprox.PathProx(units, 0.1).units is units
