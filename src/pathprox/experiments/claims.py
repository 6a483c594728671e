"""What the paper claims of PathProx, task by task, in one table: does it hold in our runs, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pathprox.experiments import convergence_tables as convergence
from pathprox.experiments import paper
from pathprox.experiments.record import Record
from pathprox.experiments.tables import NONE, mean_and_error
from pathprox.experiments.verdicts import ERRORS, POINTS, Ours, ours

TASKS = ("task1", "task2", "task3", "task4", "task5")
SETTLING = {"task1": ("figure1", "figure3"), "task2": ("task2-decay",), "task5": ("task5-decay",)}
"""Where the same comparison was made with a learning rate that decays, so that F settles."""
LEGEND = (
    "Accuracies are on clean test images, where the validation accuracy is best, and differ by so many points; so are "
    "active units, and late ones means over the last tenth of a run. Level: not lower by more than "
    f"{ERRORS:g} standard errors of both. In a third: in how many cells PathProx's balanced F is at or below the one "
    "that weight decay ends with after a third of the iterations or less."
)


COLUMNS = ("claim", *map(convergence.task_title, TASKS))


def claims(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row for each claim: what it is, and for each task whether it holds."""
    rows: list[tuple[str, Callable[[str, Sequence[Record]], str]]] = [
        (f"weight decay's accuracy is within {POINTS:g} points of the paper's", _near("weight-decay")),
        (f"PathProx's accuracy is within {POINTS:g} points of the paper's", _near("pathprox")),
        ("PathProx is at least level with weight decay", _level),
        ("its share of active units (%) is at or below the paper's", _sparse),
        ("it has weight decay's F in a third of the iterations", _soon),
        ("the same, with a learning rate that decays", _soon_settling),
    ]
    return [(title, *(holds(task, records) for task in TASKS)) for title, holds in rows]


def _cell(task: str, method: str, records: Sequence[Record]) -> Ours | None:
    """Our runs of a cell of Table 1 on clean images, if the table has it and there are any."""
    wanted = (task, method, paper.CLEAN)
    cells = [c for c in paper.cells(1) if (c.task, c.method, c.modification) == wanted]
    found = [ours(cell, records) for cell in cells]
    return found[0] if found and found[0].accuracies and not found[0].choice.differs else None


def _said(met: bool, how: str) -> str:
    return f"{'yes' if met else 'no'}: {how}"


def _near(method: str) -> Callable[[str, Sequence[Record]], str]:
    def holds(task: str, records: Sequence[Record]) -> str:
        mine = _cell(task, method, records)
        if mine is None:
            return NONE
        off = mean_and_error(mine.accuracies).mean - mine.cell.accuracy.mean
        return _said(abs(off) <= POINTS, f"{off:+.2f}")

    return holds


def _level(task: str, records: Sequence[Record]) -> str:
    theirs, mine = (_cell(task, method, records) for method in ("weight-decay", "pathprox"))
    if theirs is None or mine is None:
        return NONE
    one, other = mean_and_error(mine.accuracies), mean_and_error(theirs.accuracies)
    off, error = one.mean - other.mean, math.hypot(one.error, other.error)
    spread = f" ± {error:.2f}" if math.isfinite(error) else ""
    return _said(off >= 0 or off >= -ERRORS * error, f"{off:+.2f}{spread}")


def _sparse(task: str, records: Sequence[Record]) -> str:
    mine = _cell(task, "pathprox", records)
    if mine is None:
        return NONE
    best, late = (mean_and_error(found) for found in (mine.actives, mine.late_actives))
    told = f"{best.mean:.1f}, late {late.mean:.1f}; paper {mine.cell.active.mean:.1f}"
    return _said(best.mean <= mine.cell.active.mean, told)


def _share(tasks: Sequence[str], records: Sequence[Record]) -> str:
    outcomes = [race.outcome for task in tasks for race in convergence.counted(task, records)]
    return f"{outcomes.count(convergence.SOON)} of {len(outcomes)}" if outcomes else NONE


def _soon(task: str, records: Sequence[Record]) -> str:
    return _share([task], records)


def _soon_settling(task: str, records: Sequence[Record]) -> str:
    return _share(SETTLING.get(task, ()), records)
