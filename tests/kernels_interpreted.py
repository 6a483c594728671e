"""Run by test_fast_step.py with TRITON_INTERPRET=1: the kernels, on the CPU, against the operations of torch."""

import copy
import sys
from functools import partial

import torch

from networks import chain, strong, train
from pathprox import fused, kernels
from test_fast_step import NETWORKS, OPTIMIZERS, assert_alike, attached, data_for


def pair_of(model, data, make, steps, **options):
    """(model, optimizer, PathProx) twice, trained with the kernels and without."""
    found = []
    for on in (True, False):
        twin = copy.deepcopy(model)
        optimizer, prox = attached(twin, data[0], make, 0.05, **options)
        prox._fast.on = on
        train(twin, optimizer, data, steps)
        found.append((twin, optimizer, prox))
    assert found[0][2]._fast.step.tables is not None
    return found


SOME = ("VGG, channels last", "a chain", "grouped", "concatenation")


def after_another_optimizer(networks) -> None:
    for name in networks:
        assert_alike(*pair_of(NETWORKS[name]().double(), data_for(name), OPTIMIZERS["AdamW"], 3))


def sgd_leaves_its_step_to_the_kernels(networks) -> None:
    """All but its first, which makes the momentum."""
    for options in ({}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}):
        for name in networks if options == {"momentum": 0.9} else ("a chain",):
            make = partial(torch.optim.SGD, lr=0.02, fused=True, **options)
            pair = pair_of(NETWORKS[name]().double(), data_for(name), make, 3)
            assert_alike(*pair)
            assert pair[0][2]._fast.step.whole is not None, name


def momentum_that_is_switched_on_and_off_is_followed() -> None:
    make = partial(torch.optim.SGD, lr=0.02, fused=True)
    data = data_for("")
    pair = pair_of(chain(8, 12, 10, 4).double(), data, make, 2)
    for momentum in (0.9, 0.0):
        for one, optimizer, _ in pair:
            optimizer.param_groups[0]["momentum"] = momentum
            train(one, optimizer, data, 3)
        assert_alike(*pair)


def a_gradient_that_is_not_finite_changes_nothing() -> None:
    """Neither in a layer with units, nor in the last bias, which no unit owns."""
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    (_, optimizer, prox), _ = pair_of(model, data, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True), 3)
    live = prox.units.model
    for skipped, parameter in enumerate((live[0].weight, live[-1].bias), start=1):
        before = copy.deepcopy((live.state_dict(), optimizer.state_dict()))
        parameter.grad.view(-1)[0] = torch.inf
        optimizer.step()
        torch.testing.assert_close((live.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        assert int(prox._guard.counter(torch.device("cpu"))) == skipped
        parameter.grad.view(-1)[0] = 0.1
    optimizer.step()
    assert not torch.equal(live[0].weight, before[0]["0.weight"])
    assert not hasattr(optimizer, "found_inf")


def matrices_larger_than_a_tile() -> None:
    model, data = chain(8, 150, 70, 300, 4), data_for("", torch.float32)
    assert_alike(*pair_of(model, data, OPTIMIZERS["SGD"], 2), rtol=1e-4, atol=1e-6)


def groups_with_several_rates() -> None:
    def by_layer(parameters):
        parameters = list(parameters)
        return OPTIMIZERS["SGD"]([{"params": parameters[i : i + 4], "lr": 0.01 * (i + 1)} for i in range(0, 12, 4)])

    assert_alike(*pair_of(chain(8, 12, 10, 9, 8, 7, 4).double(), data_for(""), by_layer, 10))


def a_step_that_does_not_count_changes_nothing() -> None:
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    (_, optimizer, prox), _ = pair_of(model, data, OPTIMIZERS["momentum"], 3)
    live = prox.units.model
    for ok, value, skipped in ((False, 0.5, 0), (True, torch.nan, 1), (None, torch.inf, 2), (False, torch.nan, 2)):
        with torch.no_grad():
            live[0].weight[0, 0] = value
        before = copy.deepcopy((live.state_dict(), optimizer.state_dict()))
        prox._after_step_(None if ok is None else torch.tensor(ok))
        torch.testing.assert_close((live.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0, equal_nan=True)
        assert int(prox._guard.counter(torch.device("cpu"))) == skipped
    with torch.no_grad():
        live[0].weight[0, 0] = 0.5
    prox._after_step_(torch.tensor(True))
    assert abs(float(live[0].weight[0].norm()) - 1) < 1e-12


def norms_that_are_chosen_anew_are_followed() -> None:
    make = partial(torch.optim.SGD, lr=0.02, momentum=0.9, fused=True)
    data = data_for("")
    pair = pair_of(strong(8, 12, 10, 4), data, make, 3, gauge=4)
    for one, optimizer, prox in pair:
        prox.regauge()
        train(one, optimizer, data, 3)
    assert_alike(*pair)
    assert pair[0][2]._fast.step.whole is not None
    assert float(pair[0][2]._fast.step.gauge.max()) > 1.5


def moved_parameters_and_new_state_are_followed() -> None:
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    pair = pair_of(model, data, OPTIMIZERS["momentum"], 3)
    for one, optimizer, _ in pair:
        for p in one.parameters():
            p.data = p.data.clone()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(one, optimizer, data, 3)
    assert_alike(*pair)


if __name__ == "__main__":
    fused.load_kernels = lambda device: kernels  # also where there is no GPU
    torch.set_num_threads(1)
    torch.manual_seed(0)
    after_another_optimizer(SOME if "all" in sys.argv else SOME[:2])
    sgd_leaves_its_step_to_the_kernels(NETWORKS if "all" in sys.argv else SOME)
    momentum_that_is_switched_on_and_off_is_followed()
    a_gradient_that_is_not_finite_changes_nothing()
    matrices_larger_than_a_tile()
    groups_with_several_rates()
    a_step_that_does_not_count_changes_nothing()
    norms_that_are_chosen_anew_are_followed()
    moved_parameters_and_new_state_are_followed()
