"""Whole grids at once: the same records as one by one."""

import math

import pytest
import torch

import official
import pathprox
from pathprox.experiments import batched
from pathprox.experiments.batched import Batch, Batched
from pathprox.experiments.methods import METHODS
from pathprox.experiments.models import MLP
from pathprox.experiments.recipes import RECIPES, Grid, grid
from pathprox.experiments.record import read_all
from pathprox.experiments.stack import Plan, Stack, path_norms, smallest_squares, squares
from pathprox.experiments.stack_step import KNOWN, step_
from pathprox.experiments.sweep import Work, complete, in_turn
from test_train import small

CPU = torch.device("cpu")
EXACT = ("step", "lr")
CLOSE = ("loss", "objective", "path_norm", "balanced")


def assert_same_records(many, single, rel=2e-3):
    for one, other in zip(many, single, strict=True):
        assert (one.name, one.status) == (other.name, other.status)
        for key in EXACT:
            assert one.history[key] == other.history[key]
        for key in CLOSE:
            assert one.history[key] == pytest.approx(other.history[key], rel=rel), (one.name, key)
        assert one.history["loss"][0] == pytest.approx(other.history["loss"][0], rel=1e-6), "the same start"
        for key in ("val", "test", "active"):
            assert one.history[key] == pytest.approx(other.history[key], abs=1.5), (one.name, key)
        assert one.final.keys() == other.final.keys()


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *((method, "MLP-2-24 factorized") for method in METHODS if method in KNOWN),
        ("pathprox", "MLP-4-24"),
        ("pathprox", "MLP-3-16"),
    ],
)
def test_a_grid_trained_together_has_the_records_of_single_runs(method, model, tmp_path):
    recipe = small("figure1/pathprox", 30, method=method, model=model, look_every=10, lipschitz=False)
    cells = [(cell, 0) for cell in grid(recipe, Grid((0.03, 0.1), (1e-3, 3e-2)))]
    many = complete(cells, Work(tmp_path / "many"), Batched())
    assert_same_records(many, complete(cells, Work(tmp_path / "single"), in_turn))
    assert len(read_all(tmp_path / "many")) == 4


def test_several_seeds_each_have_their_start_and_their_batches(tmp_path):
    cells = [(small(steps=30, lr=0.05), seed) for seed in (2, 0, 1)]
    many = complete(cells, Work(tmp_path / "many"), Batched())
    single = complete(cells, Work(tmp_path / "single"), in_turn)
    assert_same_records(many, single)
    assert many[0].final["lipschitz"]["end"] == pytest.approx(single[0].final["lipschitz"]["end"], rel=1e-2)
    assert len({r.history["loss"][-1] for r in many}) == 3


def test_units_die_and_the_networks_shrink_as_in_single_runs(tmp_path):
    recipe = small("figure1/pathprox", 150, weight_decay=0.08, lr=0.1, model="MLP-2-24 factorized", look_every=50)
    many = complete([(recipe, 0)], Work(tmp_path / "many"), Batched())
    single = complete([(recipe, 0)], Work(tmp_path / "single"), in_turn)
    assert many[0].history["active"][-1] < 90
    assert many[0].final["last"]["active"] == pytest.approx(single[0].final["last"]["active"], abs=5)
    sizes = [r.final["size"]["shrunk_parameters"] for r in (many[0], single[0])]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    assert sizes[0] < many[0].final["size"]["parameters"]


def test_a_cell_that_diverges_is_recorded_and_disturbs_no_other(tmp_path):
    recipe = small(steps=20, lipschitz=False)
    fine = [(recipe.changed(lr=lr), 0) for lr in (0.03, 0.1)]
    together = complete([fine[0], (recipe.changed(lr=1e9), 0), fine[1]], Work(tmp_path / "a"), Batched())
    assert [r.status for r in together] == ["done", "diverged", "done"]
    assert together[1].history["step"] == [0]
    alone = complete(fine, Work(tmp_path / "b"), Batched())
    assert [together[0].history["loss"], together[2].history["loss"]] == [r.history["loss"] for r in alone]


def test_the_corrupted_set_is_seen_by_every_cell(tmp_path):
    official.write_mnist_c(tmp_path / "data", 20)
    cells = [(small(steps=10, lipschitz=False, lr=lr), 0) for lr in (0.03, 0.1)]
    work = {name: Work(tmp_path / name, data_dir=tmp_path / "data") for name in ("many", "single")}
    many, single = complete(cells, work["many"], Batched()), complete(cells, work["single"], in_turn)
    for one, other in zip(many, single, strict=True):
        assert one.final["corrupted"]["each"] == pytest.approx(other.final["corrupted"]["each"], abs=6)
        assert one.final["corrupted"].keys() == other.final["corrupted"].keys()


def test_an_interrupted_batch_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(batched, "SAVE_EVERY", 0.0)
    cells = [(small(steps=60, lipschitz=False, lr=lr), 0) for lr in (0.03, 0.1)]
    whole = complete(cells, Work(tmp_path / "whole"), Batched())
    work = Batch(Work(tmp_path / "cut"), cells)
    looks = iter(range(3))

    def stopping(look=work._look):
        look()
        if next(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(work, "_look", stopping)
    with pytest.raises(KeyboardInterrupt):
        list(work.run())
    assert list((tmp_path / "cut").glob("batch-*.pt"))
    again = complete(cells, Work(tmp_path / "cut"), Batched())
    assert [r.history["loss"] for r in again] == [r.history["loss"] for r in whole]
    assert not list((tmp_path / "cut").glob("batch-*.pt"))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (RECIPES["task3/pathprox"], "not VGG19"),
        (RECIPES["task1/pathprox"].changed(momentum=0.9), "without momentum"),
        (RECIPES["task1/pathprox"].changed(clip=1.0), "does not clip gradients"),
    ],
)
def test_what_cannot_be_batched_is_refused_with_the_cure(recipe, words, tmp_path):
    with pytest.raises(ValueError, match=rf"{words}.*--jobs"):
        complete([(recipe, 0)], Work(tmp_path), Batched())


def test_bf16_is_refused_since_it_would_not_be_used(tmp_path):
    with pytest.raises(ValueError, match="--precision tf32"):
        complete([(small(steps=5), 0)], Work(tmp_path, precision="bf16"), Batched())


def test_a_method_that_has_no_batched_form_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "new", METHODS["lasso"])
    with pytest.raises(ValueError, match=r"method new.*--jobs"):
        complete([(small(method="new"), 0)], Work(tmp_path), Batched())


def test_the_sums_of_squares_are_those_of_the_library():
    models = [MLP(3, 12, factorized=True, inputs=9, classes=4) for _ in range(3)]
    with torch.no_grad():
        models[1].layers[1].weight[:, ::2] = 0
        models[2].layers[4].weight *= 100
    units = [pathprox.find_units(m, torch.randn(1, 9)) for m in models]
    stack = Stack(models, Plan.of(units[0]), CPU)
    values = [pathprox.objective(u, 0.0, 2.0) for u in units]
    assert squares(stack).tolist() == pytest.approx([v.weight_decay for v in values])
    assert (2 * path_norms(stack)).tolist() == pytest.approx([v.path_norm for v in values])
    assert smallest_squares(stack).tolist() == pytest.approx([v.balanced for v in values], rel=1e-6)


def test_a_network_whose_layer_is_dead_weighs_nothing():
    model = MLP(2, 12, factorized=True, inputs=9, classes=4)
    with torch.no_grad():
        model.layers[1].weight.zero_()
    units = pathprox.find_units(MLP(2, 12, factorized=True, inputs=9, classes=4), torch.randn(1, 9))
    assert smallest_squares(Stack([model], Plan.of(units), CPU)).item() == 0
    stack = Stack([model], Plan.of(units), CPU)
    x, y = torch.randn(1, 8, 9), torch.randint(0, 4, (1, 8))
    step_(stack, x, y, "pathprox", torch.tensor([0.1]), torch.tensor([0.1]))
    assert all(math.isfinite(float(p.detach().sum())) for p in stack.parameters)
