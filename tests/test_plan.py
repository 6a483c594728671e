"""Which runs a table, a figure or the grids take, and that only those without a record are run."""

from dataclasses import replace

import pytest

import records
from pathprox.experiments.plan import PLANS, plan_of
from pathprox.experiments.sweep import Work


class Asked:
    """A pool that trains nothing: it keeps what it was asked for, and answers with made-up records."""

    def __init__(self):
        self.rounds = []

    def __call__(self, work, cells):
        if cells:
            self.rounds.append([(recipe.name, seed) for recipe, seed in cells])
        for recipe, seed in cells:
            made = replace(records.record(recipe.task, recipe.method, seed), recipe=recipe)
            made.write(work.folder)
            yield made


def asked(folder, *names, seeds=4):
    pool = Asked()
    plan_of(names).run(range(seeds), Work(folder), pool)
    return pool.rounds


def test_a_table_takes_four_seeds_of_every_method_of_its_rows(tmp_path):
    (runs,) = asked(tmp_path, "table1")
    assert len(runs) == len(set(runs)) == 4 * 8, "four tasks, two methods; rows of corrupted images share their runs"


def test_what_is_lacking_is_run_together_and_only_once(tmp_path):
    (first,) = asked(tmp_path, "table2", "table3", seeds=2)
    methods = ("weight-decay", "normalized", "pathprox", "pathprox-unbalanced")
    assert sorted(first) == sorted((f"task3/{method}", seed) for method in methods for seed in (0, 1))
    assert asked(tmp_path, "table2", seeds=2) == []
    assert len(asked(tmp_path, "table2", seeds=3)[0]) == 3


@pytest.mark.parametrize("fate", [{"status": "diverged"}, {"history": {"step": [0, 5000] * 6, "loss": [2.3] * 12}}])
def test_a_seed_that_learns_nothing_is_replaced_by_the_next_ones(tmp_path, fate):
    class Unlucky(Asked):
        def __call__(self, work, cells):
            for record in super().__call__(work, cells):
                if record.recipe.method == "normalized" and record.seed != 3:
                    record = replace(record, **fate)
                    record.write(work.folder)
                yield record

    pool = Unlucky()
    plan_of(["table2"]).run(range(2), Work(tmp_path), pool)
    again = [("task3/normalized", seed) for seed in range(2, 12)]
    assert pool.rounds[1] == again[:2]
    assert pool.rounds[2:] == [[cell] for cell in again[2:]], "the fourth learns; five for each seed are enough"
    assert asked(tmp_path, "table2", seeds=2) == []
    assert plan_of(["table2"]).lacking(range(2), tmp_path) == []


def test_what_is_lacking_can_be_told_before_it_is_run(tmp_path):
    plan, seeds = plan_of(["table2", "grids"]), range(2)
    told = plan.lacking(seeds, tmp_path)
    assert len(told) == len(set(told))
    (asked_first, *searches) = asked(tmp_path, "table2", "grids", seeds=2)
    first_seeds = [runs for runs in searches if len(runs) > 1]
    assert [(recipe.name, seed) for recipe, seed in told] == [*asked_first, *(r for runs in first_seeds for r in runs)]
    assert plan.lacking(seeds, tmp_path) == []


def test_a_searched_figure_repeats_its_choice_alone(tmp_path):
    assert [len(runs) for runs in asked(tmp_path, "figure3", seeds=3)] == [6, 2] * 3


def test_figure_4_is_made_of_all_cells_with_one_seed(tmp_path):
    methods = ("weight-decay", "lasso", "group-lasso", "pathprox")
    assert asked(tmp_path, "figure4") == [[(f"task5/{method}", 0)] * 8 for method in methods]


def test_the_grids_are_in_full_where_networks_are_small_and_else_the_cells_beside_the_choice(tmp_path):
    beside, *searches = asked(tmp_path, "grids", seeds=1)
    assert len(beside) == 5 + 5 + 5 + 4, "Task 4's choice for PathProx is at the edge of the grid"
    assert {name.split("/")[0] for name, _ in beside} == {"task3", "task4"}
    assert [len(runs) for runs in searches] == [42] * 4


def test_all_is_everything():
    assert set(plan_of(["all"]).recipes) == {recipe for plan in PLANS.values() for recipe in plan.recipes}


def test_another_length_for_all_of_it():
    assert {recipe.steps for recipe in plan_of(["figure1", "figure4", "grids"]).lasting(60).recipes} == {60}


def test_what_the_paper_does_not_have_is_answered_with_what_it_has():
    with pytest.raises(ValueError, match="nothing to run for table4, figure7: choose from all, table1"):
        plan_of(["table4", "figure1", "figure7"])
