"""One battery for every optimizer of torch.optim: it is supported and does all this, or it is refused with a reason."""

import copy

import pytest
import torch
from torch import nn, optim

from networks import assert_balanced, assert_on_the_sphere, attached, batch, chain, train
from pathprox import PathProx, find_units
from pathprox.stepsize import REFUSED, RULES, Rule, rule_for

EVERY = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]

CASES = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD tensor lr": lambda p: optim.SGD(p, lr=torch.tensor(0.05)),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam decoupled": lambda p: optim.Adam(p, lr=0.01, decoupled_weight_decay=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.001, centered=True, momentum=0.9),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
}


@pytest.fixture(params=CASES)
def make(request):
    return CASES[request.param]


def test_every_optimizer_of_torch_is_known_or_refused():
    covered = {type(make([nn.Parameter(torch.zeros(1))])) for make in CASES.values()}
    for kind in EVERY:
        assert (kind in RULES) != (kind.__name__ in REFUSED), kind
        assert kind in covered or kind.__name__ in REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_others_are_refused_with_a_reason(name):
    model = chain(8, 16, 4, bias=False)
    optimizer = getattr(optim, name)(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="(?s)" + REFUSED[name][:20] + ".*Use one of SGD"):
        PathProx(find_units(model, torch.randn(1, 8)), 0.1).attach(optimizer)
    torch.testing.assert_close(model.state_dict(), before)


def test_an_unknown_optimizer_is_refused_until_it_says_how_it_steps():
    class Mine(optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad

    model, data = chain(8, 16, 4), batch()
    optimizer = Mine(model.parameters(), 0.05)
    prox = PathProx(find_units(model, data[0][:1]), 0.1)
    with pytest.raises(TypeError, match=r"does not know the step size of Mine.*RULES\[YourOptimizer\]"):
        prox.attach(optimizer)
    RULES[Mine] = Rule(lambda options, state: options["lr"])
    try:
        prox.attach(optimizer)
        train(model, optimizer, data, 200)
        assert prox.units.count_active()[0] < 16
    finally:
        del RULES[Mine]


def test_subclasses_follow_their_parents():
    class Kept(optim.SGD):
        pass

    assert rule_for(Kept([nn.Parameter(torch.zeros(1))], lr=0.1)) is RULES[optim.SGD]


def test_it_trains_and_holds_the_constraints(make):
    model, data = chain(8, 32, 24, 24, 4), batch()
    optimizer, prox = attached(model, data[0], make, 1e-3)
    losses = train(model, optimizer, data, 60)
    assert losses[-1] < losses[0] - 0.02
    assert_on_the_sphere(prox.units)
    assert_balanced(prox.units)


def test_it_kills_units_exactly(make):
    model, data = chain(8, 32, 4), batch()
    optimizer, prox = attached(model, data[0], make, 5.0)
    train(model, optimizer, data, 300)
    alive, count = prox.units.count_active()
    assert alive < count


def test_state_dict_round_trip(make):
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, prox = attached(model, data[0], make, 1e-3)
    train(model, optimizer, data, 3)
    other = chain(8, 16, 12, 10, 4)
    optimizer2, prox2 = attached(other, data[0], make, 1e-3)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    prox2.load_state_dict(prox.state_dict())
    train(model, optimizer, data, 5)
    train(other, optimizer2, data, 5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_deepcopy_goes_on_alike(make):
    model, data = chain(8, 16, 4), batch()
    optimizer, prox = attached(model, data[0], make, 1e-2)
    train(model, optimizer, data, 3)
    twin, twin_optimizer, _ = copy.deepcopy((model, optimizer, prox))
    train(model, optimizer, data, 5)
    train(twin, twin_optimizer, data, 5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_closures_and_schedulers(make):
    model, data = chain(8, 16, 4), batch()
    optimizer, prox = attached(model, data[0], make, 1e-2)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        return loss

    for _ in range(5):
        assert optimizer.step(closure) is not None
        schedule.step()
    assert_on_the_sphere(prox.units)


def test_non_contiguous_parameters(make):
    model, data = chain(8, 16, 4), batch()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not layer.weight.is_contiguous()
    twin = chain(8, 16, 4)
    twin.load_state_dict(model.state_dict())
    for net in (model, twin):
        optimizer, _ = attached(net, data[0], make, 1e-2)
        train(net, optimizer, data, 5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_it_says_what_it_is(make):
    model, data = chain(8, 16, 4), batch()
    optimizer, prox = attached(model, data[0], make, 1e-2)
    units = "Units(1 groups, 1 couplings, 16 units)"
    assert repr(prox) == f"PathProx(weight_decay=0.01, {units}, attached to {type(optimizer).__name__})"
