"""How soon PathProx is where weight decay ends, cell by cell, and how active units come and go, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pathprox.experiments.choice import choose, differences, done, nearest, of_paper
from pathprox.experiments.figures_parts import best_lr, values
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import TASKS
from pathprox.experiments.record import DIVERGED, DONE, Record
from pathprox.experiments.tables import NONE, markdown_table, mean, numbers

THIRD = 1 / 3
"""Of the iterations: what PathProx may take to be where weight decay ends."""
ORDER = ("figure1", "figure2", "figure3", "task1", "task2", "task2-decay", "task3", "task4", "task5", "task5-decay")
OTHERS_MINIMISERS = ("lasso", "group-lasso")
"""They have other minimisers than F."""
BEYOND = ("pathprox-gauge",)
"""Methods that the paper does not have, shown beside its own."""
LOST = 2.0
"""A run whose F ends at more than so many times its least has blown up."""
SOON, LATE, NEVER = "yes", "later", "never"
NO_RECORD = "no record yet"
OBJECTIVE = ".4f"
"""How values of F are written."""


def task_title(task: str) -> str:
    """Task 5 is what Figure 4 is made of."""
    name, _, decayed = task.partition("-")
    more = ", decaying lr" if decayed else " (Figure 4)" if task == "task5" else ""
    return f"{'Task' if task.startswith('task') else 'Figure'} {name[-1]}{more}"


@dataclass(frozen=True)
class Race:
    """A method beside weight decay, with the same weight decay (and so the same F) and the same seeds."""

    task: str
    method: str
    lr: str
    weight_decay: float
    theirs: tuple[Record, ...]
    """Weight decay's runs, one for each seed; all are done."""
    ours: tuple[Record, ...]
    """The method's runs with these seeds."""
    differs: tuple[str, ...] = ()
    """From the paper's recipes, but for learning rate and weight decay."""

    @property
    def steps(self) -> float:
        """The iterations that the slowest seed takes to be where weight decay ends; infinite: it never is."""
        return max(first_below(ours, final(theirs)) for theirs, ours in zip(self.theirs, self.ours, strict=True))

    @property
    def share(self) -> float:
        """The same in lengths of the run."""
        return self.steps / self.ours[0].recipe.steps

    @property
    def outcome(self) -> str:
        if not all(map(settled, self.ours)):
            return DIVERGED
        return NEVER if math.isinf(self.share) else SOON if self.share <= THIRD else LATE


def final(record: Record, name: str = "balanced") -> float:
    """What a column of the history ends with."""
    return values(record, name)[-1]


def settled(record: Record) -> bool:
    """Whether a run has kept what it had: some blow up in the end without a number that is not finite."""
    return record.status == DONE and final(record) <= LOST * min(values(record, "balanced"))


def first_below(record: Record, level: float) -> float:
    """The first look at which the balanced objective is at or below the level, as the number of its step."""
    looks = zip(record.history["step"], values(record, "balanced"), strict=True)
    return next((step for step, value in looks if value <= level), math.inf)


def races(task: str, records: Sequence[Record]) -> list[Race]:
    """Every cell of a task in which there are runs of weight decay and of another method that minimises F."""
    theirs = _cells(records, f"{task}/weight-decay", (DONE,))
    methods = [m for m in (*of_paper(task), *BEYOND) if m != "weight-decay" and m not in OTHERS_MINIMISERS]
    found = []
    for method in methods:
        ours = _cells(records, f"{task}/{method}", (DONE, DIVERGED))
        for cell in sorted(set(theirs) & set(ours)):
            lr, weight_decay, differs = cell
            if not all(map(settled, theirs[cell].values())):
                continue
            found += _race(task, f"{lr:g}", weight_decay, theirs[cell], ours[cell], differs)
    return sorted(found, key=lambda r: (float(r.lr), r.weight_decay, r.differs, methods.index(r.method)))


_Cell = tuple[float, float, tuple[str, ...]]


def _cells(records: Sequence[Record], name: str, statuses: Sequence[str]) -> dict[_Cell, dict[int, Record]]:
    """The runs of a recipe by hyperparameters and what differs, then by seed; the one that measured most counts."""
    found: dict[_Cell, dict[int, Record]] = {}
    for r in sorted(records, key=lambda r: r.measured):
        if r.recipe.name == name and r.status in statuses and (r.status == DIVERGED or math.isfinite(final(r))):
            found.setdefault((r.recipe.lr, r.recipe.weight_decay, differences(r)), {})[r.seed] = r
    return found


def _race(
    task: str,
    lr: str,
    weight_decay: float,
    theirs: Mapping[int, Record],
    ours: Mapping[int, Record],
    differs: tuple[str, ...] = (),
) -> list[Race]:
    """Over the seeds that both have; nothing where there is none."""
    seeds = sorted(set(theirs) & set(ours))
    runs = tuple(theirs[s] for s in seeds), tuple(ours[s] for s in seeds)
    return [Race(task, ours[seeds[0]].recipe.method, lr, weight_decay, *runs, differs)] if seeds else []


def best_races(records: Sequence[Record]) -> list[Race]:
    """Figure 3 as the paper draws it: each method with the learning rate that brings its own F lowest."""
    best = {}
    for method in of_paper("figure3"):
        if runs := nearest(done(records, f"figure3/{method}")):
            best[method] = {r.seed: r for r in best_lr(runs)}
    found = []
    theirs = best.pop("weight-decay", {})
    for ours in best.values():
        if theirs and ours:
            one, other = next(iter(theirs.values())).recipe, next(iter(ours.values())).recipe
            found += _race("figure3", f"{one.lr:g} and {other.lr:g}", one.weight_decay, theirs, ours)
    return found


RACE = (
    "lr",
    "weight decay",
    "method",
    "n",
    "F as it is: weight decay",
    "F as it is: method",
    "F balanced: weight decay",
    "F balanced: method",
    "there after",
    "of the run",
    "in a third",
)


def race_table(found: Sequence[Race]) -> str:
    return markdown_table(RACE, [_race_row(race) for race in found])


def _race_row(race: Race) -> tuple[str, ...]:
    dagger = f" † {', '.join(race.differs)}" if race.differs else ""
    head = (race.lr, f"{race.weight_decay:g}", METHODS[race.method].title + dagger, str(len(race.ours)))
    pairs = [(race.theirs, "objective"), (race.ours, "objective"), (race.theirs, "balanced"), (race.ours, "balanced")]
    if race.outcome == DIVERGED:
        ends = [mean([final(r, n) for r in runs], OBJECTIVE) if runs is race.theirs else NONE for runs, n in pairs]
        return (*head, *ends, DIVERGED, NONE, "no")
    ends = [mean([final(r, name) for r in runs], OBJECTIVE) for runs, name in pairs]
    if race.outcome == NEVER:
        return (*head, *ends, NEVER, NONE, "no")
    return (*head, *ends, f"{race.steps:,.0f}", f"{race.share:.2f}", "yes" if race.outcome == SOON else "no")


SUMMARY = (
    "task",
    "cells",
    "in a third or less",
    "later",
    "never",
    "PathProx diverged or blew up",
    "does the claim hold?",
)


def summary_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """For each task, in how many cells PathProx is soon where weight decay ends; runs at the paper's length alone."""
    rows = []
    for task in ORDER:
        outcomes = [race.outcome for race in counted(task, records)]
        counts = [outcomes.count(outcome) for outcome in (SOON, LATE, NEVER, DIVERGED)]
        rows.append((task_title(task), str(len(outcomes)), *map(str, counts), holds(outcomes)))
    return rows


def counted(task: str, records: Sequence[Record]) -> list[Race]:
    """The races that the claim is about."""
    return [race for race in races(task, records) if race.method == "pathprox" and not race.differs]


def holds(outcomes: Sequence[str]) -> str:
    """The claim over several cells."""
    soon = outcomes.count(SOON)
    if not outcomes:
        return NO_RECORD
    return "yes" if soon == len(outcomes) else "no" if not soon else f"in {soon} of {len(outcomes)} cells"


def slow_table(records: Sequence[Record]) -> str:
    """The cells in which PathProx is not there after a third of the run; empty where there is none."""
    rows = []
    for task in ORDER:
        for outcome in (LATE, NEVER, DIVERGED):
            cells: dict[float, list[str]] = {}
            for race in counted(task, records):
                if race.outcome == outcome:
                    cells.setdefault(race.weight_decay, []).append(race.lr)
            rows += [(task_title(task), f"{wd:g}", ", ".join(lrs), outcome) for wd, lrs in sorted(cells.items())]
    return markdown_table(("task", "weight decay", "lr", "where weight decay ends"), rows) if rows else ""


SWING = (
    "task",
    "method",
    "n",
    "active, best",
    "mean, last tenth",
    "spread, last tenth",
    "lowest to highest, last tenth",
    "largest jump, last tenth",
    "largest jump, whole run",
)


def swing_table(records: Sequence[Record]) -> str:
    """What active shares do between looks, for the paper's recipes in which any unit ever dies; empty without."""
    rows = []
    for task in TASKS:
        for method in METHODS:
            choice = choose(f"{task}/{method}", records)
            if any(min(values(r, "active")) < 100 for r in choice.records):
                title = METHODS[method].title + (" †" if choice.differs else "")
                rows.append((task_title(task), title, *_swing(choice.records)))
    return markdown_table(SWING, rows) if rows else ""


def _swing(runs: Sequence[Record]) -> tuple[str, ...]:
    """Means over the seeds, but the extremes of all of them."""
    late = [values(r, "active")[-r.final["last"]["looks"] :] for r in runs]
    return (
        str(len(runs)),
        mean(numbers(runs, "best", "active")),
        mean(numbers(runs, "last", "active")),
        mean(numbers(runs, "last", "active_spread")),
        f"{min(map(min, late)):.1f} to {max(map(max, late)):.1f}",
        f"{max(map(largest_jump, late)):.1f}",
        f"{max(largest_jump(values(r, 'active')) for r in runs):.1f}",
    )


def largest_jump(column: Sequence[float]) -> float:
    """Between one look and the next."""
    return max((abs(b - a) for a, b in pairwise(column)), default=0.0)


LIPSCHITZ = (("lipschitz", "constant"), ("test", "accuracy"))
"""Columns of the history and what they are called."""


def lipschitz_table(records: Sequence[Record]) -> str:
    """The median local Lipschitz constant on the way beside the test accuracy, for Figure 1; empty without.

    Of the runs that measured it those of the length with the most seeds.
    """
    lengths: dict[int, dict[str, list[Record]]] = {}
    for method in of_paper("figure1"):
        for r in done(records, f"figure1/{method}"):
            if "lipschitz" in r.history:
                lengths.setdefault(r.recipe.steps, {}).setdefault(method, []).append(r)
    if not lengths:
        return ""
    runs = max(lengths.values(), key=lambda found: sum(map(len, found.values())))
    steps = next(iter(runs.values()))[0].history["step"]
    heads = [f"{METHODS[m].title}, {label}" for _, label in LIPSCHITZ for m in runs]
    curves = [[values(r, name) for r in found] for name, _ in LIPSCHITZ for found in runs.values()]
    looks = range(0, len(steps), -(-len(steps) // 11))
    rows = [(f"{steps[i]:,.0f}", *(mean([curve[i] for curve in found]) for found in curves)) for i in looks]
    return markdown_table(("iterations", *heads), rows)
