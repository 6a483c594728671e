"""Whether a number of the paper was met again, by a rule that is fixed here, and the paper's tables with verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pathprox.experiments import paper
from pathprox.experiments.choice import Choice, choose
from pathprox.experiments.convergence_tables import NO_RECORD, task_title
from pathprox.experiments.methods import METHODS
from pathprox.experiments.record import Record
from pathprox.experiments.tables import (
    NONE,
    accuracies,
    difference,
    markdown_table,
    mean,
    mean_and_error,
    numbers,
    shown,
    standard_errors,
)

POINTS = 0.5
"""So far from the paper's an accuracy may lie, in points."""
ERRORS = 2.0
"""Or so many standard errors, of both combined."""
ROUNDING = 1e-9
REPRODUCED, PARTLY, NOT, OTHER = "reproduced", "partly", "not", "no verdict: not the paper's recipe"
RULES = (
    f"Accuracy is met if it lies within {POINTS:g} points of the paper's, above or below, or within {ERRORS:g} "
    "standard errors. A standard error is that of both numbers combined, the root of the sum of their squares; with a "
    "single seed there is none (n/a), and the points alone count.",
    f"The active share is met if it is at or below the paper's plus {ERRORS:g} standard errors; with a single seed "
    "those of the paper alone.",
    "Both are taken where the validation accuracy is best, as in the paper, with the paper's hyperparameters.",
    f"*{REPRODUCED}*: both are met. *{PARTLY}*: one of them. *{NOT}*: none. Where the paper has all units active that "
    "cannot be missed, and accuracy alone decides.",
    "Without a record there is no verdict, nor for runs that are not the paper's recipe (marked †).",
)


@dataclass(frozen=True)
class Ours:
    """What stands beside one cell of the paper."""

    cell: paper.Cell
    choice: Choice
    accuracies: tuple[float, ...]
    late_accuracies: tuple[float, ...]
    actives: tuple[float, ...]
    late_actives: tuple[float, ...]

    @property
    def label(self) -> str:
        method = METHODS[self.cell.method].title
        return f"{task_title(self.cell.task)}, {self.cell.modification}, {method}"

    @property
    def verdict(self) -> str:
        """Reproduced, partly or not, and why not; or why there is no verdict."""
        if not self.accuracies or not self.actives:
            return NO_RECORD
        if self.choice.differs:
            return OTHER
        return judge(self.cell, mean_and_error(self.accuracies), mean_and_error(self.actives))


def ours(cell: paper.Cell, records: Sequence[Record]) -> Ours:
    """The runs with the paper's hyperparameters; on corrupted images "late" is the last network alone."""
    choice = choose(f"{cell.task}/{cell.method}", records)
    runs = choice.records
    reached = (accuracies(cell, runs), accuracies(cell, runs, late=True))
    active = (numbers(runs, place, "active") for place in ("best", "last"))
    return Ours(cell, choice, *map(tuple, (*reached, *active)))


def judge(cell: paper.Cell, accuracy: paper.Value, active: paper.Value) -> str:
    """The verdict on a cell, from our accuracy and our active share."""
    missed = []
    if not accuracy_met(accuracy, cell.accuracy):
        missed.append(f"accuracy {'above' if accuracy.mean > cell.accuracy.mean else 'below'}")
    if not active_met(active, cell.active):
        missed.append("more active units")
    tested = 2 if cell.active.mean < paper.ALL.mean else 1
    if not missed:
        return REPRODUCED
    return f"{NOT if len(missed) == tested else PARTLY}: {', '.join(missed)}"


def accuracy_met(mine: paper.Value, theirs: paper.Value) -> bool:
    near = abs(mine.mean - theirs.mean) <= POINTS + ROUNDING
    return near or abs(standard_errors(mine, theirs)) <= ERRORS + ROUNDING  # never where that is not a number


def active_met(mine: paper.Value, theirs: paper.Value) -> bool:
    error = math.hypot(theirs.error, mine.error if math.isfinite(mine.error) else 0.0)
    return mine.mean <= theirs.mean + ERRORS * error + ROUNDING


COLUMNS = (
    "task",
    "images",
    "method",
    "n",
    "accuracy, paper",
    "ours, best",
    "ours, late",
    "difference",
    "in s.e.",
    "active, paper",
    "ours, best",
    "ours, late",
    "in s.e.",
    "verdict",
)


def verdict_table(number: int, records: Sequence[Record]) -> str:
    """A table of the paper with ours beside it, and the verdict."""
    return markdown_table(COLUMNS, [_row(ours(cell, records)) for cell in paper.TABLES[number]])


def _row(mine: Ours) -> tuple[str, ...]:
    cell = mine.cell
    head = (cell.task.removeprefix("task"), cell.modification, METHODS[cell.method].title)
    if not mine.accuracies:
        nothing = (NO_RECORD, *[NONE] * 3)
        return (*head, "0", shown(cell.accuracy), *nothing, shown(cell.active), *nothing)
    dagger = " †" if mine.choice.differs else ""
    accuracy = mean_and_error(mine.accuracies)
    return (
        *head,
        str(len(mine.accuracies)),
        shown(cell.accuracy),
        shown(accuracy) + dagger,
        mean(mine.late_accuracies),
        f"{accuracy.mean - cell.accuracy.mean:+.2f}",
        _in_errors(mine.accuracies, cell.accuracy),
        shown(cell.active),
        mean(mine.actives),
        mean(mine.late_actives),
        _in_errors(mine.actives, cell.active),
        mine.verdict,
    )


def _in_errors(found: Sequence[float], theirs: paper.Value) -> str:
    return difference(mean_and_error(found) if found else None, theirs, none="n/a")


def cells() -> list[paper.Cell]:
    """Every cell of the tables once: the later ones repeat some of the first."""
    return list(dict.fromkeys(cell for found in paper.TABLES.values() for cell in found))


def tally(records: Sequence[Record]) -> list[str]:
    """How many cells have which verdict, and which of them are not wholly reproduced, a line each."""
    found = [ours(cell, records) for cell in cells()]
    words = Counter(mine.verdict.partition(":")[0] for mine in found)
    counts = [f"{words[word]} {word}" for word in (REPRODUCED, PARTLY, NOT)]
    without = len(found) - sum(words[word] for word in (REPRODUCED, PARTLY, NOT))
    lines = [f"Of the {len(found)} cells of Tables 1 to 3: {', '.join(counts)}, {without} without a verdict."]
    missed = [mine for mine in found if mine.verdict.partition(":")[0] in (PARTLY, NOT)]
    return [*lines, *(f"{mine.label}: {mine.verdict}." for mine in missed)]
