"""Grids and repeats: every cell once, the choice by validation accuracy, then the other seeds of the chosen cell.

A cell whose record is finished is never run again, so an interrupted sweep continues by being started again. Where the
work is done is a `Pool`: processes of this machine, or actors of a Ray cluster.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from pathprox.experiments.choice import select
from pathprox.experiments.loop import Setting
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.record import DONE, Record, find, run_name
from pathprox.experiments.train import run

TRIES = 3
"""How often a cell is tried when the process that works on it dies."""

Cell = tuple[Recipe, int]
"""A recipe and a seed."""
Seen = Callable[[Record, int, int], None]
"""Called when a cell is finished: its record, how many are, of how many."""


@dataclass(frozen=True)
class Work:
    """What a worker has to know beside the cell."""

    folder: Path
    data_dir: Path | None = None
    device: str | None = None
    precision: str | None = None
    compiled: bool = False

    def __call__(self, cell: Cell) -> Record:
        """Run the cell, or go on with it where another process left it."""
        setting = Setting.of(self.device, self.precision, self.compiled)
        return run(*cell, self.folder, setting=setting, data_dir=self.data_dir, resume=True)


class Pool(Protocol):
    def __call__(self, work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        """The records of the cells, in the order in which they are finished."""


class CellError(RuntimeError):
    """A cell could not be run. What the others have brought is kept."""


def sweep(
    cells: Sequence[Recipe], seeds: Sequence[int], work: Work, pool: Pool, seen: Seen | None = None
) -> list[Record]:
    """Run every cell with the first seed, and the best one of them with all others. Returns all records.

    Task 5 has no best cell: its figure shows them all.
    """
    first = complete([(recipe, seeds[0]) for recipe in cells], work, pool, seen)
    if len(seeds) == 1 or cells[0].prune:
        return first
    best = chosen(cells, first)
    return first + complete([(best, seed) for seed in seeds[1:]], work, pool, seen)


def chosen(cells: Sequence[Recipe], records: Sequence[Record]) -> Recipe:
    """The cell with the best validation accuracy; for Figure 3, which is about the objective, with the lowest one."""
    if cells[0].task == "figure3":
        ended = [r for r in records if r.status == DONE and r.seed == records[0].seed]
        if not ended:
            raise ValueError("every cell of the grid diverged: there is nothing to choose from.")
        return min(ended, key=lambda r: r.final["last"]["balanced"]).recipe
    lr, weight_decay = select(records)
    return next(r for r in cells if (r.lr, r.weight_decay) == (lr, weight_decay))


def complete(cells: Sequence[Cell], work: Work, pool: Pool, seen: Seen | None = None) -> list[Record]:
    """The records of all cells; those that are not there yet are run."""
    known = [find(work.folder, *c) for c in cells]
    found = {record.name: record for record in known if record is not None and record.finished}
    for count, record in enumerate(list(found.values()), 1):
        if seen is not None:
            seen(record, count, len(cells))
    for record in pool(work, [c for c in cells if run_name(*c) not in found]):
        found[record.name] = record
        if seen is not None:
            seen(record, len(found), len(cells))
    return [found[run_name(*c)] for c in cells]


def in_turn(work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
    """One after the other, in this process."""
    return map(work, cells)


@dataclass(frozen=True)
class Processes:
    """Several at a time on the device of this machine. A cell whose process dies goes on from its last checkpoint.

    On a GPU their kernels take turns, unless NVIDIA's multi-process service runs (``nvidia-cuda-mps-control -d``),
    which lets them overlap.
    """

    workers: int

    def __call__(self, work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        waiting = list(cells)
        for _ in range(TRIES):
            broken: list[Cell] = []
            if not waiting:
                return
            with self._executor(min(self.workers, len(waiting))) as executor:
                futures: dict[Future[Record], Cell] = {executor.submit(work, cell): cell for cell in waiting}
                try:
                    for future in as_completed(futures):
                        try:
                            yield future.result()
                        except BrokenProcessPool:
                            broken.append(futures[future])
                except BaseException:
                    executor.shutdown(wait=False, cancel_futures=True)
                    raise
            waiting = broken
        if waiting:
            names = ", ".join(run_name(*cell) for cell in waiting)
            raise CellError(
                f"the processes that worked on {names} were killed {TRIES} times, perhaps for lack of memory. "
                "What was finished is kept: start the sweep again with fewer --jobs."
            )

    def _executor(self, workers: int) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        threads = max(1, (os.cpu_count() or 1) // workers)
        return ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(threads,))


@dataclass(frozen=True)
class Ray:
    """Actors of a Ray cluster. They need not share a file system with this process: records come back by value."""

    address: str
    """Of the cluster; "local" starts one on this machine."""
    workers: int
    gpus: float = 0.0
    """Of each actor."""

    def __call__(self, work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        if not cells:
            return
        ray = _ray()
        # an actor works in another folder than this process
        work = replace(work, folder=work.folder.resolve(), data_dir=work.data_dir and work.data_dir.resolve())
        if not ray.is_initialized():  # it stays so until the process ends: a sweep has two rounds
            where = {"include_dashboard": False} if self.address == "local" else {}
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **where)
        actors: list[Any] = []
        try:
            options = {"max_restarts": -1, "max_task_retries": TRIES - 1, "num_cpus": 1, "num_gpus": self.gpus}
            actor = ray.remote(**options)(_Actor)
            actors = [actor.remote(work) for _ in range(min(self.workers, len(cells)))]
            yield from self._collect(ray, actors, work, cells)
        finally:
            for handle in actors:
                ray.kill(handle)

    def _collect(self, ray: Any, actors: Sequence[Any], work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        """Each actor has one cell at a time, so that one that dies takes no other cell with it."""
        waiting = list(reversed(cells))
        busy = {a.run.remote(waiting[-1]): (a, waiting.pop()) for a in actors}
        failed: list[str] = []
        while busy:
            (ready,), _ = ray.wait(list(busy), num_returns=1)
            actor, cell = busy.pop(ready)
            try:
                record = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                failed.append(f"{run_name(*cell)}: {error}")
            else:
                record.write(work.folder)
                yield record
            if waiting:
                cell = waiting.pop()
                busy[actor.run.remote(cell)] = (actor, cell)
        if failed:
            raise CellError(
                f"these cells were given up after {TRIES} tries; start the sweep again to run them:\n"
                + "\n".join(failed)
            )


class _Actor:
    """Works in a folder of its own machine, which another try on that machine continues from."""

    def __init__(self, work: Work) -> None:
        self._work = replace(work, folder=_scratch(work.folder))

    def run(self, cell: Cell) -> Record:
        return self._work(cell)


def _scratch(folder: Path) -> Path:
    """On a machine that shares the file system it is the folder itself."""
    return folder if folder.is_dir() else Path(tempfile.gettempdir()) / "pathprox-runs" / folder.name


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError("--ray needs the package ray: pip install 'pathprox[ray]'") from error
    return ray
