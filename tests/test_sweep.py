"""Sweeps: grid, choice, repeats; nothing run twice, nothing lost when a worker dies."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pathprox.experiments.recipes import Grid, grid
from pathprox.experiments.record import Record, read_all
from pathprox.experiments.sweep import CellError, Processes, Ray, Work, chosen, complete, in_turn, sweep
from test_train import numbers, small

RECIPE = small(steps=20, lipschitz=False, corrupted=None)
CELLS = grid(RECIPE, Grid((0.01, 0.3), (1e-4, 1e-3)))


@dataclass(frozen=True)
class Fragile(Work):
    """Dies, as a process that the system kills, when it first meets a seed in ``deadly``; writes down every cell."""

    deadly: tuple[int, ...] = ()
    always: bool = False

    def __call__(self, cell):
        mark = self.folder / f"met-{cell[1]}"
        (self.folder / f"try-{cell[1]}-{os.getpid()}").touch()
        if cell[1] in self.deadly and (self.always or not mark.exists()):
            mark.touch()
            os._exit(9)
        return super().__call__(cell)


def test_the_grid_is_run_once_and_the_best_on_validation_repeated(tmp_path):
    lines = []
    found = sweep(CELLS, range(3), Work(tmp_path), in_turn, lambda record, n, of: lines.append((record.name, n, of)))
    assert len(found) == 6
    assert [n for _, n, _ in lines] == [1, 2, 3, 4, 1, 2]
    best = chosen(CELLS, found)
    first = [r for r in found if r.seed == 0]
    assert best == max(first, key=lambda r: r.final["best"]["val"]).recipe
    assert {r.seed for r in found if r.recipe == best} == {0, 1, 2}
    assert len(read_all(tmp_path)) == 6


def test_finished_cells_are_not_run_again_and_an_interrupted_sweep_continues(tmp_path):
    work = Work(tmp_path)
    complete([(cell, 0) for cell in CELLS[:2]], work, in_turn)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    run = []

    def pool(work, cells):
        run.extend(cells)
        return in_turn(work, cells)

    sweep(CELLS, [0], work, pool)
    assert run == [(cell, 0) for cell in CELLS[2:]]
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())


def test_a_cell_that_diverges_is_recorded_and_not_chosen(tmp_path):
    found = sweep([*CELLS, RECIPE.changed(lr=1e9)], [0], Work(tmp_path), in_turn)
    assert found[-1].status == "diverged"
    assert chosen(CELLS, found).lr < 1


def test_figure_3_is_chosen_by_its_objective(tmp_path):
    cells = [replace(c, task="figure3") for c in CELLS]
    found = sweep(cells, [0], Work(tmp_path), in_turn)
    best = min(found, key=lambda r: r.final["last"]["balanced"])
    assert chosen(cells, found) == best.recipe


def test_processes_give_the_numbers_of_one_after_the_other(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    cells = [(CELLS[0], 0), (CELLS[3], 1)]
    alone = complete(cells, Work(tmp_path / "a"), in_turn)
    several = complete(cells, Work(tmp_path / "b"), Processes(2))
    assert [numbers(r) for r in several] == [numbers(r) for r in alone]


def test_a_cell_whose_process_is_killed_is_run_again_and_nothing_is_doubled(tmp_path):
    cells = [(RECIPE, seed) for seed in range(3)]
    found = complete(cells, Fragile(tmp_path, deadly=(1,)), Processes(2))
    assert [r.seed for r in found] == [0, 1, 2]
    assert all(r.status == "done" for r in found)
    assert len(read_all(tmp_path)) == 3
    assert len(list(tmp_path.glob("try-1-*"))) >= 2


def test_a_cell_that_always_kills_its_process_is_given_up_and_the_others_are_kept(tmp_path):
    with pytest.raises(CellError, match=r"seed1.*were killed 3 times.*fewer --jobs"):
        complete([(RECIPE, 1)], Fragile(tmp_path, deadly=(1,), always=True), Processes(1))


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="ray is an extra")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if not ray.is_initialized():  # started once in a process, and not stopped: a second start may hang
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@pytest.mark.filterwarnings("ignore")
def test_on_ray_a_killed_worker_s_cell_is_run_again_and_nothing_is_lost_or_doubled(cluster, tmp_path):
    cells = [(RECIPE, seed) for seed in range(3)]
    seen: list[Record] = []
    found = complete(cells, Fragile(tmp_path, deadly=(1,)), Ray("local", 2), lambda record, n, of: seen.append(record))
    assert [r.seed for r in found] == [0, 1, 2]
    assert sorted(r.seed for r in seen) == [0, 1, 2], "every cell is told once"
    assert len(list(tmp_path.glob("try-1-*"))) == 2
    assert len(list(tmp_path.glob("try-0-*"))) == 1, "the other cells were not disturbed"
    (tmp_path / "here").mkdir()
    assert [numbers(r)["history"] for r in found] == [
        numbers(r)["history"] for r in complete(cells, Work(tmp_path / "here"), in_turn)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_on_ray_a_cell_that_is_given_up_is_named_and_the_others_are_kept(cluster, tmp_path):
    cells = [(RECIPE, seed) for seed in range(2)]
    with pytest.raises(CellError, match=r"given up after 3 tries(.|\n)*seed1"):
        complete(cells, Fragile(tmp_path, deadly=(1,), always=True), Ray("local", 1))
    assert [r.seed for r in read_all(tmp_path)] == [0]


def test_without_ray_the_cure_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'pathprox\[ray\]'"):
        list(Ray("local", 1)(Work(Path(tmp_path)), [(RECIPE, 0)]))
