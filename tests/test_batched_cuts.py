"""Task 5 for whole grids at once: the same cuts, and the same training of the cut networks, as one by one."""

import copy

import pytest
import torch

from pathprox.experiments import batched
from pathprox.experiments.batched import Batch, Batched
from pathprox.experiments.batched_training import Feed
from pathprox.experiments.batches import Batches
from pathprox.experiments.data import load
from pathprox.experiments.loop import Loop, Setting
from pathprox.experiments.models import MLP
from pathprox.experiments.recipes import Grid, Pruning, Recipe, grid
from pathprox.experiments.stack import Plan, Stack
from pathprox.experiments.stack_step import KNOWN, Mask, fold_, step_
from pathprox.experiments.sweep import Work, complete, in_turn
from test_batched import CPU, assert_same_records
from test_train import small

COARSE = Pruning((20, 40), 0.3, 20)
"""A threshold that cuts units also of networks that have hardly been trained."""


def assert_same_cuts(many, single):
    for one, other in zip(many, single, strict=True):
        for a, b in zip(one.final["pruned"], other.final["pruned"], strict=True):
            for key in ("checkpoint", "active", "parameters"):
                assert a[key] == b[key], (one.name, key)
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-3), one.name
            assert (a["val"], a["test"]) == pytest.approx((b["val"], b["test"]), abs=1.5), one.name
            assert a.keys() == b.keys()


def both(cells, folder, most=64):
    return complete(cells, Work(folder / "many"), Batched(most)), complete(cells, Work(folder / "single"), in_turn)


@pytest.mark.parametrize(
    "method", ["weight-decay", "pathprox", *(pytest.param(m, marks=pytest.mark.slow) for m in ("lasso", "group-lasso"))]
)
def test_task_5_has_the_records_of_single_runs(method, tmp_path, monkeypatch):
    """Two seeds, so that no two of the eight networks but those of one seed and checkpoint share their batches."""
    monkeypatch.setattr(Recipe, "counts_all_groups", method != "pathprox")
    recipe = small(f"task5/{method}", 40, look_every=10, prune=COARSE)
    cells = [(cell, seed) for cell in grid(recipe, Grid((0.1,), (1e-3, 3e-2))) for seed in (0, 1)]
    many, single = both(cells, tmp_path)
    assert_same_records(many, single)
    assert_same_cuts(many, single)
    cuts = [cut for record in many for cut in record.final["pruned"]]
    assert {cut["checkpoint"] for cut in cuts} == {20, 40}
    assert any(0 < cut["active"] < 100 for cut in cuts)
    assert len({cut["parameters"] for cut in cuts}) > 2, "networks of several sizes are trained together"
    assert all(record.data["trained_together"] == 4 for record in many)


def test_units_that_were_zero_once_stay_zero_as_in_single_runs(tmp_path):
    prune = Pruning((100, 150), 1e-5, 30)
    recipe = small("task5/pathprox", 150, look_every=10, weight_decay=0.05, lr=0.1, prune=prune)
    many, single = both([(recipe, 0)], tmp_path)
    active = many[0].history["active"]
    assert active == sorted(active, reverse=True)
    assert active[-1] < 90
    assert active == pytest.approx(single[0].history["active"], abs=5)
    assert [cut["active"] for cut in many[0].final["pruned"]] == [active[10], active[15]]
    free = complete([(recipe.changed(prune=None), 0)], Work(tmp_path), Batched())[0].history["active"]
    assert free != sorted(free, reverse=True)


@pytest.mark.parametrize(
    ("method", "everywhere"), [("pathprox", False), ("pathprox", True), ("group-lasso", True), ("weight-decay", False)]
)
def test_the_mask_does_what_that_of_a_single_network_does(method, everywhere, monkeypatch):
    monkeypatch.setattr(Recipe, "counts_all_groups", everywhere)
    recipe = small(f"task5/{method}", lr=0.1, weight_decay=1e-3, model="MLP-2-24 factorized", prune=COARSE)
    model = MLP(2, 24, factorized=True)
    with torch.no_grad():
        model.layers[1].weight[:, :5] = 0
        model.layers[1].weight[20] = 0  # then what reads this unit is shorter, if the mask is about it
        model.layers[2].weight[:, 3:9] = 0
    loop = Loop(recipe, model, torch.randn(2, 1, 28, 28), Setting(CPU))
    stack = Stack([model, MLP(2, 24, factorized=True)], Plan.of(loop.units), CPU)
    mask = Mask(stack, stack.hidden if everywhere else stack.plan.pairs)
    assert loop.mask is not None
    loop.mask()
    mask.hold_(stack)
    if method == "pathprox":
        fold_(stack)
    if everywhere:  # a unit that the next step silences, and what reads it is shorter in the middle of training
        loop.mask.alive[1][15] = mask.alive[1][0, 15] = False
    rates = torch.tensor([0.1, 0.1]), torch.tensor([1e-3, 1e-3])
    for _ in range(5):
        x, y = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
        loop.step(x, y, 0.1)
        step_(stack, x[None], y[None], method, *rates, mask)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(stack.state(0)[name], tensor, rtol=1e-4, atol=1e-6)
    assert not stack.weights[1][0, :, :5].any()
    assert bool(stack.weights[2][0, :, [3, 8, 15, 20]].any()) is not everywhere, "only what is counted is held"
    assert stack.weights[1][1].any(0).all(), "the other network is whole"


@pytest.mark.parametrize("method", sorted(KNOWN))
def test_narrow_networks_among_wide_ones_are_trained_as_by_themselves(method):
    models = [MLP(2, width, factorized=True, inputs=9, classes=4) for width in (12, 5, 8)]
    plan = Plan(((0, 1), (2, 3)), (), ((1, 2),))
    alone = [Stack([model], plan, CPU) for model in models]
    stack = Stack(models, plan, CPU)
    lr, weight_decay = torch.tensor([0.1, 0.2, 0.05]), torch.tensor([0.01, 0.02, 0.0])
    for _ in range(10):
        x, y = torch.randn(3, 16, 9), torch.randint(0, 4, (3, 16))
        step_(stack, x, y, method, lr, weight_decay, Mask(stack, plan.pairs))
        for i, one in enumerate(alone):
            only = slice(i, i + 1)
            step_(one, x[only], y[only], method, lr[only], weight_decay[only], Mask(one, plan.pairs))
    for i, one in enumerate(alone):
        for mine, wide in zip(one.parameters, stack.parameters, strict=True):
            inside = tuple(map(slice, mine.shape[1:]))
            torch.testing.assert_close(wide[i][inside], mine[0], rtol=1e-4, atol=1e-6)
            rest = wide[i].clone()
            rest[inside] = 0
            assert not rest.any()


def test_each_network_sees_the_batches_of_its_seed_and_checkpoint():
    data = load("mnist-embedded")
    batches = {seed: Batches(data, 200, seed, CPU) for seed in (0, 1)}
    keys = [(0, 30), (1, 0), (0, 0), (1, 0)]
    feed = Feed(batches, keys, CPU)
    for step in (0, 1, 99):  # blocks of 100 batches
        x, y = map(feed.spread, feed.at(step))
        for i, (seed, begin) in enumerate(keys):
            images, labels = copy.copy(batches[seed]).at(begin + step)
            assert torch.equal(x[i], images)
            assert torch.equal(y[i], labels)


def test_a_network_that_has_lost_a_whole_layer_is_seen_but_not_trained_on(tmp_path):
    recipe = small("task5/pathprox", lr=0.05, prune=Pruning((30, 60), 1e-5, 30))
    cells = [(recipe.changed(weight_decay=decay), 0) for decay in (3.0, 1e-3)]
    many, single = both(cells, tmp_path)
    assert_same_cuts(many, single)
    assert [cut["active"] for cut in many[0].final["pruned"]] == [0, 0]
    assert many[0].final["pruned"][0]["loss"] == pytest.approx(single[0].final["pruned"][0]["loss"], rel=1e-5)
    assert many[1].final["pruned"][1]["test"] > 50
    lost = complete(cells[:1], Work(tmp_path / "alone"), Batched())[0]
    assert lost.final["pruned"] == many[0].final["pruned"], "also where there is no other"


def test_a_cell_that_diverges_is_recorded_and_disturbs_no_other(tmp_path):
    """One while the whole network is trained, one only after it was cut."""
    recipe = small("task5/weight-decay", 2, look_every=1, lipschitz=False, prune=Pruning((1, 2), 1e-5, 60))
    cells = [(recipe.changed(lr=lr), 0) for lr in (0.03, 100.0, 1e30, 0.1)]
    many, single = both(cells, tmp_path)
    assert [r.status for r in many] == [r.status for r in single] == ["done", "diverged", "diverged", "done"]
    assert many[1].final.keys() == single[1].final.keys() == {"best", "last", "pruned"}
    assert many[1].final["pruned"] == single[1].final["pruned"] == []
    assert "cut at step 1 is nan" in many[1].message
    assert many[2].final == single[2].final == {}
    fine = complete([cells[0], cells[3]], Work(tmp_path / "fine"), Batched())
    assert_same_cuts([many[0], many[3]], fine)
    few = complete(cells, Work(tmp_path / "few"), Batched(1))
    assert [r.status for r in few] == [r.status for r in many]


@pytest.mark.parametrize(("left", "step"), [(4, 10), (2, 20), (2, 0), (0, 0)])
def test_a_batch_that_was_killed_among_the_cut_networks_goes_on(left, step, tmp_path, monkeypatch):
    """Two networks at a time: in the first pair, in the second, between the two, and when all is done."""
    monkeypatch.setattr(batched, "SAVE_EVERY", 0.0)
    recipe = small("task5/group-lasso", 40, look_every=10, prune=COARSE)
    cells = [(recipe.changed(lr=lr), 0) for lr in (0.03, 0.1)]
    whole = complete(cells, Work(tmp_path / "whole"), Batched(2))
    work = Batch(Work(tmp_path / "cut"), cells, 2)

    def stopping(save=work.save):
        save()
        if work.cuts._todo is not None and (len(work.cuts._todo), work.cuts._step) == (left, step):
            raise KeyboardInterrupt

    monkeypatch.setattr(work, "save", stopping)
    with pytest.raises(KeyboardInterrupt):
        list(work.run())
    monkeypatch.setattr(batched, "SAVE_EVERY", 1e9)
    again = complete(cells, Work(tmp_path / "cut"), Batched(2))
    assert [r.final for r in again] == [r.final for r in whole]
    assert [r.history["loss"] for r in again] == [r.history["loss"] for r in whole]
    assert [len(r.final["pruned"]) for r in again] == [2, 2]
    assert not list((tmp_path / "cut").glob("batch-*.pt"))


def test_a_batch_that_was_killed_before_the_cuts_keeps_what_was_dead_and_what_was_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(batched, "SAVE_EVERY", 0.0)
    prune = Pruning((100, 150), 1e-5, 10)
    cells = [(small("task5/pathprox", 150, look_every=10, weight_decay=0.05, lr=0.1, prune=prune), 0)]
    whole = complete(cells, Work(tmp_path / "whole"), Batched())
    work = Batch(Work(tmp_path / "cut"), cells)

    def stopping(save=work.save):
        save()
        if work.step == 120:
            raise KeyboardInterrupt

    monkeypatch.setattr(work, "save", stopping)
    with pytest.raises(KeyboardInterrupt):
        list(work.run())
    assert not all(bool(alive.all()) for alive in work.training.mask.alive)
    again = complete(cells, Work(tmp_path / "cut"), Batched())
    assert again[0].final == whole[0].final
    assert again[0].history["active"] == whole[0].history["active"]
    assert again[0].seconds >= again[0].history["seconds"][-1] > work.records[0].history["seconds"][-1]
