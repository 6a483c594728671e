"""The recipes: the paper's hyperparameters, and records that keep them."""

import json

import pytest
import torch

import pathprox
from pathprox.experiments import paper
from pathprox.experiments.choice import named
from pathprox.experiments.data import load
from pathprox.experiments.methods import METHODS
from pathprox.experiments.models import build
from pathprox.experiments.recipes import CHOSEN, GRIDS, RECIPES, Grid, Recipe, grid, neighbours, recipe_of
from pathprox.experiments.record import Record, find, read_all

TABLE_OF_THE_PAPER = {
    # task: (weight decay's lambda and lr, PathProx's lambda and lr)
    "task1": ((0.001, 0.3), (0.0001, 0.3)),
    "task2": ((0.00003, 0.1), (0.0003, 0.1)),
    "task3": ((0.001, 0.1), (0.001, 0.1)),
    "task4": ((0.001, 0.3), (0.003, 0.1)),
}


@pytest.mark.parametrize("task", TABLE_OF_THE_PAPER)
def test_the_chosen_hyperparameters_are_those_of_the_paper(task):
    mine = tuple((RECIPES[f"{task}/{m}"].weight_decay, RECIPES[f"{task}/{m}"].lr) for m in ("weight-decay", "pathprox"))
    assert mine == TABLE_OF_THE_PAPER[task]


def test_every_cell_of_every_table_has_a_recipe():
    cells = [cell for table in paper.TABLES.values() for cell in table]
    assert {f"{c.task}/{c.method}" for c in cells} <= set(RECIPES)
    assert all(RECIPES[f"{c.task}/{c.method}"].corrupted for c in cells if c.modification == paper.CORRUPTED)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_whole(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.lr_at(0) == recipe.lr
    assert recipe.steps // recipe.look_every >= 50
    assert recipe.task not in GRIDS or recipe in grid(recipe), "the paper's choice is a cell of the paper's grid"
    assert sum(r.key == recipe.key for r in RECIPES.values()) == 1


@pytest.mark.parametrize(
    ("task", "couplings", "units"),
    [("task1", 3, 1200), ("task2", 3, 1200), ("task3", 8, 2752), ("task5", 3, 2400), ("figure2", 1, 200)],
)
def test_the_networks_have_the_couplings_of_the_paper(task, couplings, units):
    shape = {"task3": (1, 3, 32, 32), "figure2": (1, 2)}.get(task, (1, 784))
    found = pathprox.find_units(build(RECIPES[f"{task}/pathprox"].model), torch.randn(shape))
    assert (len(found.couplings), sum(map(len, found.couplings))) == (couplings, units)


def test_the_rivals_of_task_5_have_as_many_neurons_as_the_factorized_network():
    units = pathprox.find_units(build(RECIPES["task5/lasso"].model), torch.randn(1, 784))
    assert sum(map(len, units)) == 2400


def test_the_lengths_of_the_vgg_recipes_are_160_epochs_with_steps_at_80_and_120():
    for name, images in (("task3/pathprox", 45000), ("task4/pathprox", 67257)):
        recipe, epoch = RECIPES[name], images // 128
        assert recipe.steps == 160 * epoch
        assert [recipe.lr_at(n * epoch) for n in (79, 80, 119, 120)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


def test_the_grid_of_task_1_has_42_cells():
    cells = grid(RECIPES["task1/pathprox"])
    assert len({c.key for c in cells}) == 42
    assert [len(grid(RECIPES[f"{t}/pathprox"])) for t in ("task2", "task3", "task4", "task5")] == [42, 28, 16, 8]


def test_a_recipe_that_only_ends_sooner_or_later_keeps_its_milestones():
    recipe = recipe_of("task3/pathprox")
    assert recipe.until(112_320).milestones == recipe.milestones == (28_080, 42_120)
    assert recipe.until(30_000).milestones == (28_080,)
    assert recipe.until(112_320).look_every == recipe.look_every
    assert recipe_of("figure2/pathprox").until(5000).snapshots == (2000,)
    assert recipe_of("task5/lasso").until(12_000).cuts == (5000, 10_000)


def test_neighbours_are_the_next_cells_of_the_grid():
    found = {(r.lr, r.weight_decay) for r in neighbours(recipe_of("task3/pathprox"))}
    assert found == {(0.1, 1e-3), (0.03, 1e-3), (0.3, 1e-3), (0.1, 3e-4), (0.1, 3e-3)}
    corner = {(r.lr, r.weight_decay) for r in neighbours(recipe_of("task4/pathprox"))}
    assert corner == {(0.1, 3e-3), (0.03, 3e-3), (0.3, 3e-3), (0.1, 1e-3)}, "3e-3 is the largest weight decay"


def test_a_task_without_a_grid_says_how_to_give_one():
    with pytest.raises(ValueError, match=r"no grid for figure1.*--grid"):
        grid(RECIPES["figure1/pathprox"])
    assert len(grid(RECIPES["figure1/pathprox"], Grid((0.1,), (1e-4, 1e-3)))) == 2


def test_a_shorter_recipe_keeps_its_proportions():
    recipe = RECIPES["task5/pathprox"].lasting(3000)
    assert recipe.prune.checkpoints == (500, 1000, 1500, 2000, 2500, 3000)
    assert recipe.prune.steps == 1000
    assert RECIPES["figure1/pathprox"].lasting(1000).milestones == (500, 750)
    for name, whole in RECIPES.items():
        for steps in (1, 2, 7, 100):
            short = whole.lasting(steps)
            assert short.steps == steps, name
            assert short.steps / short.look_every <= 50, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "magic"}, "method 'magic' is none of weight-decay"),
        ({"model": "MLP-x"}, "no network 'MLP-x'"),
        ({"data": "imagenet"}, "data 'imagenet' is none of"),
        ({"lr": 0}, "lr must be above 0"),
        ({"weight_decay": -1.0}, "must not be negative"),
        ({"milestones": (50, 20)}, "milestones must rise"),
        ({"learning_rate": 1.0}, "no learning_rate; its fields are"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_reason(change, words):
    with pytest.raises(ValueError, match=words):
        RECIPES["task1/pathprox"].changed(**change)


def test_an_unknown_recipe_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"there is no recipe 'task9'.*task1/weight-decay"):
        recipe_of("task9")


def test_any_method_runs_on_any_task_as_the_one_that_it_varies():
    papers = {"weight-decay", "pathprox", "pathprox-unbalanced", "normalized", "path-norm", "lasso", "group-lasso"}
    assert {m for methods in CHOSEN.values() for m in methods} == papers
    assert all(named(f"{task}/{method}").name == f"{task}/{method}" for task in CHOSEN for method in METHODS)
    decay, prox = (named(f"task1/{method}") for method in ("weight-decay-biases", "pathprox-before"))
    assert (decay.weight_decay, prox.weight_decay) == (1e-3, 1e-4)
    assert decay == RECIPES["task1/weight-decay"].changed(method="weight-decay-biases")
    assert named("task4/lasso") == RECIPES["task4/pathprox"].changed(method="lasso")


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = Record(RECIPES["task5/pathprox"], 3, status="done", data={"origin": "x"})
    record.add(step=0, loss=1.25, val=50.0)
    record.final["pruned"] = [{"checkpoint": 5000, "active": 12.5}]
    path = record.write(tmp_path)
    assert path.parent == tmp_path / "task5" / "pathprox"
    assert Record.read(path) == record
    assert find(tmp_path, record.recipe, 3) == record
    assert find(tmp_path, record.recipe, 2) is None
    assert read_all(tmp_path) == [record]
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left behind"


def test_a_number_that_is_not_finite_is_null_in_a_record(tmp_path):
    record = Record(RECIPES["task1/pathprox"], 0)
    record.add(loss=float("nan"))
    assert Record.read(record.write(tmp_path)).history == {"loss": [None]}


def test_a_damaged_record_is_named(tmp_path):
    path = Record(RECIPES["task1/pathprox"], 0).write(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=f"{path.name} is not a record of a run.*Delete it"):
        read_all(tmp_path)


def test_the_points_of_the_plane_have_outliers_and_are_the_same_every_time():
    data = load("plane")
    assert data.train.images.shape == (200, 2, 1, 1)
    assert torch.equal(load("plane").train.images, data.train.images)
    assert not torch.equal(data.train.images, data.test.images)
    expected = torch.arange(200) % 2
    assert int((data.train.labels != expected).sum()) == 6
