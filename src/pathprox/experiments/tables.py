"""The paper's tables beside ours, from the records of runs and from nothing else."""

from __future__ import annotations

import csv
import io
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pathprox import text
from pathprox.experiments import markup, paper
from pathprox.experiments.choice import Choice, choose, command, select, train
from pathprox.experiments.recipes import METHODS, recipe_of
from pathprox.experiments.record import Record

__all__ = ["LEGEND", "Table", "commands", "mean_and_error", "select", "table"]

MISSING, NONE = "missing", "-"
COLUMNS = (
    "task",
    "images",
    "method",
    "lr",
    "weight decay",
    "accuracy, paper",
    "accuracy, ours",
    "difference",
    "active, paper",
    "active, ours",
    "active, late",
    "parameters",
)
LEGEND = (
    "Accuracies and shares are percentages, mean ± standard error over n seeds. Ours are taken where the validation "
    "accuracy is best. difference: our accuracy less the paper's, in standard errors of both combined. active: units "
    "that are not zero; late: mean over the last tenth of the evaluations. parameters: what is left of them once the "
    "network is shrunk."
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, the same in every format."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """What is missing and what differs from the paper; commands stand between backticks."""

    def text(self) -> str:
        told = [*textwrap.wrap(LEGEND, 120), *(f"- {note}" for note in self.notes)]
        return "\n".join([self.title, "", *text.table(self.columns, self.rows), "", *told]) + "\n"

    def markdown(self) -> str:
        rows = [self.columns, ("---",) * len(self.columns), *self.rows]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"### {self.title}", "", *lines, "", LEGEND, *notes]) + "\n"

    def csv(self) -> str:
        """The columns and rows alone, so that any program reads it; a dagger still marks what differs."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()

    def html(self) -> str:
        """Without the title, which the page around it has."""
        legend = markup.paragraph(LEGEND, quiet=True)
        return "\n".join([markup.html_table(self.columns, self.rows), legend, markup.bullets(self.notes)])


def table(number: int, records: Sequence[Record], chosen: str = "paper") -> Table:
    """One of the paper's tables with our numbers beside its own.

    ``chosen``: "paper" for runs with the paper's learning rates and weight decays, "validation" for those that had
    the best validation accuracy among the records.
    """
    if number not in paper.TABLES:
        raise ValueError(f"there is no table {number}: choose one of {', '.join(map(str, paper.TABLES))}.")
    rows: list[tuple[str, ...]] = []
    remarks: dict[str, list[str]] = {}
    for cell in paper.TABLES[number]:
        choice = choose(f"{cell.task}/{cell.method}", records, chosen)
        rows.append(_row(cell, choice))
        label = f"Task {_number(cell)}, {METHODS[cell.method].title}"
        for remark in (*choice.notes, *(_about_corrupted(choice) if cell.modification == paper.CORRUPTED else ())):
            labels = remarks.setdefault(remark, [])
            # two rows may share their runs
            labels += [label] if label not in labels else []
    notes = tuple(f"{'; '.join(labels)}: {remark}." for remark, labels in remarks.items())
    return Table(f"Table {number}: {paper.TITLES[number]}", COLUMNS, tuple(rows), notes)


def commands(number: int, chosen: str = "paper") -> str:
    """What to run for a table, a line each."""
    names = dict.fromkeys(f"{cell.task}/{cell.method}" for cell in paper.TABLES[number])
    return "\n".join(command(name, chosen) for name in names)


def mean_and_error(values: Sequence[float]) -> paper.Value:
    """The mean, and the sample standard deviation divided by the root of n; not a number where n = 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return paper.Value(statistics.fmean(values), error)


def _row(cell: paper.Cell, choice: Choice) -> tuple[str, ...]:
    corrupted = cell.modification == paper.CORRUPTED
    accuracies = _each(choice, _corrupted if corrupted else lambda final: final["best"]["test"])
    ours = mean_and_error(accuracies) if accuracies else None
    dagger = " †" if choice.differs else ""
    return (
        _number(cell),
        cell.modification,
        METHODS[cell.method].title,
        NONE if choice.lr is None else f"{choice.lr:g}",
        NONE if choice.weight_decay is None else f"{choice.weight_decay:g}",
        _shown(cell.accuracy),
        f"{_shown(ours)} (n = {len(accuracies)}){dagger}" if ours else MISSING,
        _difference(ours, cell.accuracy),
        _shown(cell.active),
        _mean(_each(choice, lambda final: final["best"]["active"])),
        _mean(_each(choice, lambda final: final["last"]["active"])),
        _mean(_each(choice, lambda final: 100 * final["size"]["shrunk_parameters"] / final["size"]["parameters"])),
    )


def _number(cell: paper.Cell) -> str:
    return cell.task.removeprefix("task")


def _corrupted(final: dict[str, Any]) -> float:
    return final["corrupted"]["mean"]


def _each(choice: Choice, get: Callable[[dict[str, Any]], float]) -> list[float]:
    """That number of each run which has it: what a run did not measure is no error here."""
    found = []
    for record in choice.records:
        try:
            value = get(record.final)
        except KeyError:
            continue
        if value is not None:
            found.append(value)
    return found


def _shown(value: paper.Value) -> str:
    known = value.error > 0 and math.isfinite(value.error)
    return f"{value.mean:.2f} ± {value.error:.2f}" if known else f"{value.mean:.2f}"


def _mean(values: Sequence[float]) -> str:
    return _shown(mean_and_error(values)) if values else NONE


def _difference(ours: paper.Value | None, theirs: paper.Value) -> str:
    """With a single run there is no standard error to measure by."""
    if ours is None or not math.isfinite(ours.error):
        return NONE
    both = math.hypot(ours.error, theirs.error)
    # adding zero to what was rounded makes -0.0 a plain zero
    return f"{round((ours.mean - theirs.mean) / both, 1) + 0.0:+.1f}" if both else NONE


def _about_corrupted(choice: Choice) -> list[str]:
    """Where the corrupted images came from, and which were not there."""
    if not choice.records:
        return []
    found = [r.final.get("corrupted", {}) for r in choice.records]
    have = [f for f in found if f.get("mean") is not None]
    notes = []
    if len(have) < len(found):
        name = recipe_of(choice.name).corrupted
        cure = f"`pathprox data fetch {name}` or `pathprox data make {name}`, then `{train(choice.name)} --again`"
        notes.append(f"{len(found) - len(have)} of {len(found)} runs saw no corrupted images; {cure}")
    for origin in sorted({f["origin"] for f in have}):
        count = sum(f["origin"] == origin for f in have)
        some = "" if count == len(have) else f" in {count} of {len(have)} runs"
        whose = "the official ones" if origin == "official" else "generated by pathprox, not the official ones"
        notes.append(f"the corrupted images are {whose}{some}")
    absent = sorted({c for f in have for c in f.get("missing", ())})
    return [*notes, *([f"without the corruptions {', '.join(absent)}"] if absent else [])]
