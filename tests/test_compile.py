"""torch.compile around the model, around `optimizer.step()` and around the whole training step: the same training."""

import os
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

from networks import batch, chain
from pathprox import NormalizedWeightDecay, PathProx, find_units

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
CASES = {
    "SGD": (lambda p: SGD(p, lr=0.1, momentum=0.9), {}, True),
    "SGD, general path": (lambda p: SGD(p, lr=0.1, momentum=0.9), {}, False),
    "AdamW": (lambda p: AdamW(p, lr=0.01, weight_decay=0), {}, True),
    "AdamW in its metric": (lambda p: AdamW(p, lr=0.01, weight_decay=0), {"decoupled": False}, False),
}
"""An optimizer, options of PathProx, and whether there is a fast path and it is taken."""
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks, where a graph breaks
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
"""A compiled AdamW rounds differently, by its own way to count steps."""


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def start(make=CASES["SGD"][0]):
    """(model, data, optimizer, units), the same every time."""
    torch.manual_seed(0)
    model, data = chain(8, 16, 12, 10, 4), batch()
    return model, data, make(model.parameters()), find_units(model, data[0][:1])


def training_step(model, optimizer, step):
    def one(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        step()
        return loss

    return one


WAYS = {
    "the model": lambda model, optimizer, how: training_step(torch.compile(model, **how), optimizer, optimizer.step),
    "the training step": lambda model, optimizer, how: torch.compile(
        training_step(model, optimizer, optimizer.step), **how
    ),
}


def trained(case, way, steps=20, backend="aot_eager"):
    make, options, fast = CASES[case]
    model, data, optimizer, units = start(make)
    prox = PathProx(units, 0.01, **options).attach(optimizer)
    prox._fast.on = fast
    eager = training_step(model, optimizer, optimizer.step)
    one = eager if way is None else WAYS[way](model, optimizer, {"backend": backend})
    for _ in range(steps):
        one(*data)
    assert prox._steps == steps
    assert (prox._fast.step is not None) == fast
    return list(model.parameters())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_trains_as_what_is_not(way, case):
    for a, b in zip(trained(case, None), trained(case, way), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.timeout(200)  # the compiler is slow where nothing is cached
def test_the_training_step_trains_alike_in_compiled_kernels():
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    expected = trained("SGD", None, steps=5)
    for a, b in zip(expected, trained("SGD", "the training step", steps=5, backend="inductor"), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_the_step_itself_is_compiled_and_the_hooks_still_run():
    model, data, optimizer, units = start()
    prox = PathProx(units, 0.01).attach(optimizer)
    counter = CompileCounter()
    one = training_step(model, optimizer, torch.compile(optimizer.step, backend=counter))
    for _ in range(3):
        one(*data)
    assert counter.op_count > 0
    assert prox._steps == 3
    for a, b in zip(trained("SGD", None, steps=3), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_regulariser_can_come_and_go_after_compiling():
    runs = []
    for backend in (None, "eager"):
        model, data, optimizer, units = start()
        step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
        one = training_step(model, optimizer, step)
        one(*data)
        prox = PathProx(units, 0.01).attach(optimizer)
        for _ in range(4):
            one(*data)
        prox.detach()
        one(*data)
        assert prox._steps == 4
        runs.append(list(model.parameters()))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_closure_goes_through_a_compiled_step():
    runs = []
    for compiled in (False, True):
        model, data, optimizer, units = start()
        prox = PathProx(units, 0.01).attach(optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        closure = training_step(model, optimizer, lambda: None)
        for _ in range(4):
            step(lambda closure=closure, data=data: closure(*data))
        assert prox._steps == 4
        runs.append(list(model.parameters()))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_units_are_removed_from_a_compiled_model_in_training():
    runs = []
    for compiled in (False, True):
        model, data, optimizer, units = start()
        PathProx(units, 0.02, shrink_every=5, patience=3).attach(optimizer)
        step = training_step(model, optimizer, optimizer.step)
        step = torch.compile(step, backend="eager") if compiled else step
        for _ in range(20):
            step(*data)
        assert sum(map(len, units)) < 38
        runs.append(list(model.parameters()))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_rivals_act_in_a_compiled_step_too():
    runs = []
    for compiled in (False, True):
        model, data, optimizer, units = start()
        NormalizedWeightDecay(units, 0.01).attach(optimizer)
        step = training_step(model, optimizer, optimizer.step)
        step = torch.compile(step, backend="eager") if compiled else step
        for _ in range(4):
            step(*data)
        runs.append(list(model.parameters()))
        for group in units.couplings:
            torch.testing.assert_close(units.norm(group.into), torch.ones(len(group), dtype=torch.float64))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_that_is_not_finite_stops_a_compiled_step():
    model, data, optimizer, units = start()
    PathProx(units, 0.01).attach(optimizer)
    training_step(model, optimizer, lambda: None)(*data)
    model[0].weight.grad[0, 0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        torch.compile(optimizer.step, backend="eager")()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_compiled_as_one_graph_is_refused_with_the_cure():
    model, data, optimizer, units = start()
    PathProx(units, 0.01).attach(optimizer)
    training_step(model, optimizer, lambda: None)(*data)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the step without fullgraph=True"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


def test_units_of_a_compiled_model_are_found_where_the_message_points():
    model, data, *_ = start()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"model\._orig_mod"):
        find_units(compiled, data[0][:1])
    assert [len(g) for g in find_units(compiled._orig_mod, data[0][:1])] == [16, 12, 10]
    model.compile(backend="eager")  # in place: nothing is wrapped
    model(data[0])
    assert [len(g) for g in find_units(model, data[0][:1])] == [16, 12, 10]
