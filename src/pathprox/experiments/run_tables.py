"""What else the records hold, as Markdown: sizes, corrupted images, grids, momentum, other ways, precision."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pathprox.experiments import paper
from pathprox.experiments.choice import Choice, choose, differences, named, of_paper
from pathprox.experiments.convergence_tables import NO_RECORD, OBJECTIVE, final, task_title
from pathprox.experiments.figures import runs_of
from pathprox.experiments.figures_parts import complete, mean_staircase, solutions, staircase
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import GRIDS, TASKS, Recipe
from pathprox.experiments.record import DIVERGED, DONE, STUCK, Record, best_look
from pathprox.experiments.tables import NONE, each, markdown_table, mean, numbers, shown

SEVERITIES = ("1", "2", "3", "4", "5")
GRID_TASKS = ("task1", "task2", "task3", "task4", "task5")
"""Those whose grids are searched by validation accuracy; Figure 3 goes by the objective, Figure 4 by all cells."""
AT_MOST = (1, 3, 10, 30, 64, 100)
"""Shares of active units, in percent; the paper says that weight decay stays above 64."""


def _title(choice: Choice) -> tuple[str, str]:
    """The first two columns of a row."""
    task, method = choice.name.split("/")
    return task_title(task), METHODS[method].title + (" †" if choice.differs else "")


# Of the paper's recipes.


def size_table(records: Sequence[Record]) -> str:
    """Parameters and multiply-adds of the best network, as trained and once shrunk, for each recipe of Table 1."""
    columns = (
        "task",
        "method",
        "n",
        "parameters",
        "once shrunk",
        "left (%)",
        "multiply-adds",
        "once shrunk",
        "left (%)",
    )
    return markdown_table(columns, [_size(choose(name, records)) for name in paper.names(1)])


def _size(choice: Choice) -> tuple[str, ...]:
    sizes = [r.final["size"] for r in choice.records if "size" in r.final]
    if not sizes:
        return (*_title(choice), "0", NO_RECORD, *[NONE] * 5)
    row = [*_title(choice), str(len(sizes))]
    for what in ("parameters", "macs"):
        row += [mean([s[f"{prefix}{what}"] for s in sizes], ",.0f") for prefix in ("", "shrunk_")]
        row.append(mean([100 * s[f"shrunk_{what}"] / s[what] for s in sizes]))
    return tuple(row)


def corrupted_table(records: Sequence[Record]) -> str:
    """Accuracy on corrupted images by severity, for the recipes that the paper shows it for."""
    columns = ("task", "method", "n", "images", *(f"severity {s}" for s in SEVERITIES), "all", "all, last network")
    tasks = {cell.task for cells in paper.TABLES.values() for cell in cells if cell.modification == paper.CORRUPTED}
    chosen = [choose(name, records) for name in paper.names(*paper.TABLES) if name.split("/")[0] in tasks]
    return markdown_table(columns, [_corrupted(choice) for choice in chosen])


def _corrupted(choice: Choice) -> tuple[str, ...]:
    found = [r for r in choice.records if r.final.get("corrupted", {}).get("mean") is not None]
    if not found:
        return (*_title(choice), "0", NO_RECORD, *[NONE] * 7)

    def at(severity: str) -> str:
        return mean(each(found, lambda end: end["corrupted"]["severities"][severity]), of=len(found))

    return (
        *_title(choice),
        str(len(found)),
        ", ".join(sorted({r.final["corrupted"]["origin"] for r in found})),
        *map(at, SEVERITIES),
        mean(numbers(found, "corrupted", "mean")),
        mean(numbers(found, "corrupted", "last_mean"), of=len(found)),
    )


LOOKS = (
    "task",
    "method",
    "n",
    "accuracy, paper",
    "of all looks",
    "of the late ones",
    "augmented",
    "highest",
    "active, paper",
    "of all looks",
    "of the late ones",
    "augmented",
    "steps of all looks",
)


def look_table(records: Sequence[Record]) -> str:
    """What the best look on validation gives among all of a run, among those after the learning rate's last fall (where
    it falls), and among all on augmented validation images (where training images are); and the highest on test images.

    Empty without runs.
    """
    cells = dict.fromkeys(c for n in paper.TABLES for c in paper.cells(n) if c.modification == paper.CLEAN)
    found = {cell: choose(f"{cell.task}/{cell.method}", records).records for cell in cells}
    rows = [_look_row(cell, runs) for cell, runs in found.items() if runs]
    return markdown_table(LOOKS, rows) if rows else ""


def _look_row(cell: paper.Cell, runs: Sequence[Record]) -> tuple[str, ...]:
    every = [best_look(r) for r in runs]
    late = [best_look(r, r.recipe.milestones[-1]) for r in runs if r.recipe.milestones]
    augmented = [best_look(r, by="val_augmented") for r in runs if "val_augmented" in r.history]
    ways = every, late, augmented
    tests, actives = (
        [mean([look[name] for look in looks], of=len(runs)) for looks in ways] for name in ("test", "active")
    )
    return (
        task_title(cell.task),
        METHODS[cell.method].title,
        str(len(runs)),
        *(shown(cell.accuracy), *tests, mean([max(r.history["test"]) for r in runs])),
        *(shown(cell.active), *actives),
        ", ".join(f"{look['step']:,.0f}" for look in every),
    )


# Grids.


def grid_records(task: str, method: str, records: Sequence[Record]) -> dict[tuple[float, float], Record]:
    """The paper's recipe at each learning rate and weight decay that was tried.

    With the lowest seed that ended as it should or, where none has, the lowest there is.
    """
    found: dict[tuple[float, float], Record] = {}
    for r in sorted(records, key=lambda r: (r.outcome == DONE, -r.seed, r.measured)):
        if r.recipe.name == f"{task}/{method}" and not differences(r):
            found[r.recipe.lr, r.recipe.weight_decay] = r
    return found


def grid_summary(task: str, records: Sequence[Record]) -> str:
    """For each method how much of the grid there is, and what validation accuracy chooses beside the paper's choice."""
    columns = (
        "method",
        "cells",
        "done",
        "diverged",
        "stuck",
        "the paper's choice",
        "ours, by validation",
        "n",
        "test accuracy there",
        "active there",
    )
    return markdown_table(columns, [_grid_row(task, method, records) for method in grid_methods(task, records)])


def grid_methods(task: str, records: Sequence[Record]) -> list[str]:
    """Those that the paper searched a grid for, and others that have several cells."""
    searched = {name.split("/")[1] for name in paper.names(1)}
    return [m for m in of_paper(task) if task == "task5" or m in searched or len(grid_records(task, m, records)) > 1]


def _grid_row(task: str, method: str, records: Sequence[Record]) -> tuple[str, ...]:
    cells = grid_records(task, method, records)
    whole = len(GRIDS[task].lr) * len(GRIDS[task].weight_decay)
    counts = [str(sum(r.outcome == outcome for r in cells.values())) for outcome in (DONE, DIVERGED, STUCK)]
    theirs = named(f"{task}/{method}")
    choice = _hyper(theirs.lr, theirs.weight_decay) if task != "task5" else NONE
    head = (METHODS[method].title, f"{len(cells)} of {whole}", *counts, choice)
    ours = by_validation(task, method, records)
    if ours.lr is None or ours.weight_decay is None:
        return (*head, NO_RECORD, "0", NONE, NONE)
    there = [mean(numbers(ours.records, "best", name)) for name in ("test", "active")]
    return (*head, _hyper(ours.lr, ours.weight_decay), str(len(ours.records)), *there)


def by_validation(task: str, method: str, records: Sequence[Record]) -> Choice:
    """What validation accuracy chooses among runs of the paper's recipe at any learning rate and weight decay."""
    name = f"{task}/{method}"
    return choose(name, [r for r in records if r.recipe.name == name and not differences(r)], "validation")


def _hyper(lr: float, weight_decay: float) -> str:
    return f"lr {lr:g}, weight decay {weight_decay:g}"


def grid_table(task: str, method: str, records: Sequence[Record]) -> str:
    """Validation accuracy, test accuracy and active share over learning rates and weight decays; empty without runs.

    A seed other than 0 is named.
    """
    cells = grid_records(task, method, records)
    if not cells:
        return ""
    lrs = sorted({*GRIDS[task].lr, *(lr for lr, _ in cells)})
    decays = sorted({*GRIDS[task].weight_decay, *(wd for _, wd in cells)})
    ours = by_validation(task, method, records)
    best = ours.lr, ours.weight_decay
    rows = [(f"{wd:g}", *(_grid_cell(cells.get((lr, wd)), (lr, wd) == best) for lr in lrs)) for wd in decays]
    return markdown_table(("weight decay", *(f"lr {lr:g}" for lr in lrs)), rows)


def _grid_cell(record: Record | None, best: bool) -> str:
    if record is None:
        return NONE
    if record.status != DONE:  # a run that is stuck may be done, with numbers that say how
        return record.outcome
    text = " / ".join(f"{record.final['best'][k]:.1f}" for k in ("val", "test", "active"))
    seed = f" (seed {record.seed})" if record.seed else ""
    return (f"**{text}**" if best else text) + seed


# Figure 4.


def cut_table(records: Sequence[Record]) -> str:
    """Test accuracies of cut networks with at most so many active units, the best by validation; empty without."""
    rows = []
    for method, runs in runs_of(4, records).items():
        whole = complete(runs)
        cases = [staircase(solutions([r for r in whole if r.seed == seed])) for seed in sorted({r.seed for r in whole})]
        stairs = mean_staircase(cases)
        if stairs:
            up_to = [[test for active, test in stairs if active <= most] for most in AT_MOST]
            row = (f"{stairs[0][0]:.1f}", *(f"{found[-1]:.2f}" if found else NONE for found in up_to))
            rows.append((METHODS[method].title, str(len(cases)), *row))
    columns = ("method", "n", "fewest active (%)", *(f"accuracy, {most:g}% or fewer" for most in AT_MOST))
    return markdown_table(columns, rows) if rows else ""


# Runs that are not the paper's.

VARIED = ("lr", "weight_decay", "momentum", "clip", "batch", "data", "model", "look_every")
"""Fields of a recipe that are options of the command line, beside its length."""
OUTCOME = ("n", "accuracy", "accuracy, late", "active", "active, late", "F balanced at the end")


def _outcome(runs: Sequence[Record]) -> tuple[str, ...]:
    shares = [mean(numbers(runs, part, name)) for name in ("test", "active") for part in ("best", "last")]
    return (str(len(runs)), *shares, mean([final(r) for r in runs], OBJECTIVE))


def with_momentum(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.recipe.momentum > 0]


def in_other_ways(records: Sequence[Record]) -> list[Record]:
    """Runs of methods that the paper does not show for a task, or of its own with something changed.

    What has momentum has a table of its own, and cells of a grid differ in what the grid is about.
    """
    still = [r for r in records if r.recipe.momentum == 0]
    return [r for r in still if r.recipe.method not in of_paper(r.recipe.task) or differences(r)]


def reruns(records: Sequence[Record]) -> list[str]:
    """The commands that make such runs."""
    seeds: dict[str, set[int]] = {}
    for r in records:
        seeds.setdefault(" ".join(["pathprox train", r.recipe.name, *_options(r.recipe)]), set()).add(r.seed)
    return [" ".join([start, *(f"--seed {s}" for s in sorted(seeds[start]))]) for start in sorted(seeds)]


def _options(recipe: Recipe) -> list[str]:
    """What makes this recipe of the paper's of its name."""
    own, options = named(recipe.name), []
    if recipe.steps != own.steps:
        options.append(f"--steps {recipe.steps}")
        kept = own.until(recipe.steps)
        if own.milestones and recipe.milestones == kept.milestones:
            options.append("--keep-milestones")
            own = kept
        else:
            own = own.lasting(recipe.steps)
    if recipe.milestones and not own.milestones:
        options.append("--decay")
    if recipe.lipschitz_curve and not own.lipschitz_curve:
        options.append("--lipschitz-curve")
    changed = [f for f in VARIED if getattr(recipe, f) != getattr(own, f)]
    names = {f: "network" if f == "model" else f.replace("_", "-") for f in changed}
    return [*(f"--{names[f]} {shlex.quote(str(getattr(recipe, f)))}" for f in changed), *options]


def beside(records: Sequence[Record], others: Sequence[Record]) -> str:
    """The outcomes of some runs, and above them those of the paper's recipes for weight decay and these methods."""
    rows = []
    for task in TASKS:
        groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
        for r in others:
            if r.recipe.task == task and r.finished:
                groups.setdefault((r.recipe.method, differences(r, ignoring=())), []).append(r)
        own = dict.fromkeys(["weight-decay", "pathprox", *(method for method, _ in groups)])
        for method in own if groups else ():
            rows += _own_row(task, method, records)
        for method, what in sorted(groups, key=lambda key: (list(METHODS).index(key[0]), key[1])):
            rows += _changed_row(task, method, what, groups[method, what])
    return markdown_table(("task", "method", "what differs", *OUTCOME), rows) if rows else ""


def _own_row(task: str, method: str, records: Sequence[Record]) -> list[tuple[str, ...]]:
    choice = choose(f"{task}/{method}", records)
    if method not in of_paper(task) or choice.differs or not choice.records:
        return []
    return [(task_title(task), METHODS[method].title, "the paper's recipe", *_outcome(choice.records))]


def _changed_row(task: str, method: str, what: Sequence[str], runs: Sequence[Record]) -> list[tuple[str, ...]]:
    differs = list(what) or ["the method alone"]
    ended = [r for r in runs if r.outcome == DONE]
    failed = Counter(r.outcome for r in runs if r.outcome != DONE)
    differs += [f"{count} of {len(runs)} {outcome}" for outcome, count in sorted(failed.items())]
    outcome = _outcome(ended) if ended else ("0", *[NONE] * (len(OUTCOME) - 1))
    return [(task_title(task), METHODS[method].title, ", ".join(differs), *outcome)]


def precision_table(records: Sequence[Record]) -> str:
    """Recipes that were run at several precisions, a row for each of these; empty without."""
    cells: dict[Any, dict[str, dict[int, Record]]] = {}
    for r in records:
        if r.outcome == DONE:
            recipe = r.recipe
            key = list(TASKS).index(recipe.task), list(METHODS).index(recipe.method), recipe.lr, recipe.weight_decay
            cells.setdefault((*key, differences(r)), {}).setdefault(r.precision, {})[r.seed] = r
    rows = []
    for key in sorted(cells):
        for precision, runs in sorted(cells[key].items()) if len(cells[key]) > 1 else ():
            some = [runs[seed] for seed in sorted(runs)]
            recipe = some[0].recipe
            head = task_title(recipe.task), METHODS[recipe.method].title, _hyper(recipe.lr, recipe.weight_decay)
            rows.append((*head, precision, *_outcome(some), f"{mean([r.seconds for r in some], '.0f')}"))
    return markdown_table(("task", "method", "hyperparameters", "precision", *OUTCOME, "seconds"), rows) if rows else ""
