"""The runs that a table, a figure or the grids of the paper take; those without a record are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from pathprox.experiments import figures, paper
from pathprox.experiments.recipes import CHOSEN, Recipe, grid, neighbours, recipe_of
from pathprox.experiments.record import DIVERGED, STUCK, find
from pathprox.experiments.sweep import Cell, Pool, Seen, Work, complete, sweep

IN_FULL = ("task1", "task2")
"""Tasks whose grids are run in full; a network of the others takes too long, and has the cells beside its choice."""
SPARE = 5
"""A seed that learns nothing is replaced by the next one, until so many times the seeds were tried besides."""


@dataclass(frozen=True)
class Plan:
    """Runs to be made."""

    repeated: tuple[Recipe, ...] = ()
    """With every seed."""
    once: tuple[Recipe, ...] = ()
    """With the first seed."""
    searches: tuple[tuple[Recipe, ...], ...] = ()
    """Grids: each cell with the first seed, the best one with all."""

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.repeated + other.repeated, self.once + other.once, self.searches + other.searches)

    @property
    def recipes(self) -> list[Recipe]:
        """Each once."""
        return list(dict.fromkeys([*self.repeated, *self.once, *(r for cells in self.searches for r in cells)]))

    def lasting(self, steps: int) -> Plan:
        """The same runs at another length."""

        def cut(recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
            return tuple(recipe.lasting(steps) for recipe in recipes)

        return Plan(cut(self.repeated), cut(self.once), tuple(map(cut, self.searches)))

    def run(self, seeds: Sequence[int], work: Work, pool: Pool, seen: Seen | None = None) -> None:
        """First all that nothing has to be chosen for, together, so that the pool stays busy; then the searches."""
        tried: list[Cell] = []
        while new := [cell for cell in self._certain(seeds, work.folder) if cell not in tried]:
            complete(new, work, pool, seen)
            tried += new
        for search in dict.fromkeys(self.searches):
            sweep(search, seeds, work, pool, seen)

    def lacking(self, seeds: Sequence[int], folder: Path) -> list[Cell]:
        """What has no finished record under the folder, but for the repeats of what a search will choose."""
        searched = [(recipe, seeds[0]) for search in self.searches for recipe in search]
        cells = dict.fromkeys([*self._certain(seeds, folder), *searched])
        return [cell for cell in cells if (record := find(folder, *cell)) is None or not record.finished]

    def _certain(self, seeds: Sequence[int], folder: Path) -> list[Cell]:
        """What is known before any search."""
        repeated = [(recipe, seed) for recipe in self.repeated for seed in _learning(recipe, seeds, folder)]
        return list(dict.fromkeys([*repeated, *((recipe, seeds[0]) for recipe in self.once)]))


def _learning(recipe: Recipe, seeds: Sequence[int], folder: Path) -> list[int]:
    """These seeds, and for each with a record under the folder that says it is stuck or has diverged the next one.

    Either comes early: a run that diverges ends at its next look, and a stuck one after a tenth of its steps or so.
    """
    taken = list(seeds)
    spare = islice(count(max(seeds) + 1), SPARE * len(seeds))
    for seed in taken:  # which grows
        record = find(folder, recipe, seed)
        if record is not None and record.outcome in (STUCK, DIVERGED):
            taken += islice(spare, 1)
    return taken


def of_table(number: int) -> Plan:
    """One recipe for each method of each task: several rows may share their runs."""
    return Plan(tuple(map(recipe_of, paper.names(number))))


def of_figure(number: int) -> Plan:
    """One recipe for each method, or its grid where the figure shows the best of it."""
    kind = figures.kind_of(number)
    own = tuple(recipe_of(f"{kind.task}/{method}") for method in CHOSEN[kind.task])
    return Plan(searches=tuple(tuple(grid(recipe)) for recipe in own)) if kind.searched else Plan(own)


def of_grids() -> Plan:
    """The paper's searches by validation accuracy."""
    own = list(map(recipe_of, paper.names(1)))
    return Plan(
        once=tuple(cell for recipe in own if recipe.task not in IN_FULL for cell in neighbours(recipe)),
        searches=tuple(tuple(grid(recipe)) for recipe in own if recipe.task in IN_FULL),
    )


PLANS: dict[str, Plan] = {
    **{f"table{number}": of_table(number) for number in paper.TABLES},
    **{f"figure{number}": of_figure(number) for number in figures.FIGURES},
    "grids": of_grids(),
}


def plan_of(names: Sequence[str]) -> Plan:
    """What these take together; "all" is all of it."""
    wanted = list(PLANS) if "all" in names else names
    if unknown := [name for name in wanted if name not in PLANS]:
        raise ValueError(f"there is nothing to run for {', '.join(unknown)}: choose from all, {', '.join(PLANS)}.")
    return sum((PLANS[name] for name in wanted), Plan())
