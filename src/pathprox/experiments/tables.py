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
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import recipe_of
from pathprox.experiments.record import Record

__all__ = [
    "LEGEND",
    "Table",
    "commands",
    "each",
    "markdown_table",
    "mean",
    "mean_and_error",
    "numbers",
    "select",
    "shown",
    "standard_errors",
    "table",
]

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
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"### {self.title}", "", markdown_table(self.columns, self.rows), "", LEGEND, *notes]) + "\n"

    def csv(self) -> str:
        """The columns and rows alone, so that any program reads it; a dagger still marks what differs."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()

    def html(self) -> str:
        """Without the title, which the page around it has."""
        legend = markup.paragraph(LEGEND, quiet=True)
        return "\n".join([markup.html_table(self.columns, self.rows), legend, markup.bullets(self.notes)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table; a bar within a cell does not end it."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)


def table(number: int, records: Sequence[Record], chosen: str = "paper") -> Table:
    """One of the paper's tables with our numbers beside its own.

    ``chosen``: "paper" for runs with the paper's learning rates and weight decays, "validation" for those that had
    the best validation accuracy among the records.
    """
    rows: list[tuple[str, ...]] = []
    remarks: dict[str, list[str]] = {}
    for cell in paper.cells(number):
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
    return "\n".join(command(name, chosen) for name in paper.names(number))


def mean_and_error(values: Sequence[float]) -> paper.Value:
    """The mean, and the sample standard deviation divided by the root of n; not a number where n = 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return paper.Value(statistics.fmean(values), error)


def _row(cell: paper.Cell, choice: Choice) -> tuple[str, ...]:
    found = accuracies(cell, choice.records)
    ours = mean_and_error(found) if found else None
    dagger = " †" if choice.differs else ""
    return (
        _number(cell),
        cell.modification,
        METHODS[cell.method].title,
        NONE if choice.lr is None else f"{choice.lr:g}",
        NONE if choice.weight_decay is None else f"{choice.weight_decay:g}",
        shown(cell.accuracy),
        f"{shown(ours)} (n = {len(found)}){dagger}" if ours else MISSING,
        difference(ours, cell.accuracy),
        shown(cell.active),
        mean(numbers(choice.records, "best", "active")),
        mean(numbers(choice.records, "last", "active")),
        mean(each(choice.records, _left)),
    )


def accuracies(cell: paper.Cell, records: Sequence[Record], late: bool = False) -> list[float]:
    """Of the best network of each run, as the paper has it; ``late``: of the last looks, or of the last network."""
    if cell.modification == paper.CLEAN:
        return numbers(records, "last" if late else "best", "test")
    severity = paper.SEVERITY.get(recipe_of(f"{cell.task}/{cell.method}").corrupted or "")
    if severity is None:
        return numbers(records, "corrupted", "last_mean" if late else "mean")
    return each(records, lambda final: final["corrupted"]["last_severities" if late else "severities"][severity])


def _number(cell: paper.Cell) -> str:
    return cell.task.removeprefix("task")


def _left(final: dict[str, Any]) -> float:
    """What is left of the parameters, in percent."""
    return 100 * final["size"]["shrunk_parameters"] / final["size"]["parameters"]


def each(records: Sequence[Record], get: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """That number of each run which has it: what a run did not measure is no error here."""
    found = []
    for record in records:
        try:
            value = get(record.final)
        except KeyError:
            continue
        if value is not None:
            found.append(value)
    return found


def numbers(records: Sequence[Record], part: str, name: str) -> list[float]:
    """The same for a number by its place in what a run leaves, like ("best", "test")."""
    return each(records, lambda final: final[part][name])


def shown(value: paper.Value, form: str = ".2f") -> str:
    known = value.error > 0 and math.isfinite(value.error)
    return f"{value.mean:{form}} ± {value.error:{form}}" if known else f"{value.mean:{form}}"


def mean(values: Sequence[float], form: str = ".2f", of: int = 0) -> str:
    """With how many there are, if that is less than the number of runs ``of`` which the reader has been told."""
    few = f" (n = {len(values)})" if len(values) < of else ""
    return shown(mean_and_error(values), form) + few if values else NONE


def standard_errors(ours: paper.Value, theirs: paper.Value) -> float:
    """Our mean less theirs, in standard errors of both combined; not a number where there is none to measure by.

    So it is with a single run.
    """
    both = math.hypot(ours.error, theirs.error)
    return (ours.mean - theirs.mean) / both if both else math.nan


def difference(ours: paper.Value | None, theirs: paper.Value, none: str = NONE) -> str:
    found = math.nan if ours is None else standard_errors(ours, theirs)
    # adding zero to what was rounded makes -0.0 a plain zero
    return f"{round(found, 1) + 0.0:+.1f}" if math.isfinite(found) else none


def _about_corrupted(choice: Choice) -> list[str]:
    """Where the corrupted images came from, and which were not there."""
    if not choice.records:
        return []
    found = [r.final.get("corrupted", {}) for r in choice.records]
    have = [f for f in found if f.get("mean") is not None]
    name = recipe_of(choice.name).corrupted
    severity = paper.SEVERITY.get(name or "")
    notes = [f"the accuracy is that at severity {severity}, which the paper's must be of"] if severity else []
    if len(have) < len(found):
        cure = f"`pathprox data fetch {name}` or `pathprox data make {name}`, then `{train(choice.name)} --again`"
        notes.append(f"{len(found) - len(have)} of {len(found)} runs saw no corrupted images; {cure}")
    for origin in sorted({f["origin"] for f in have}):
        count = sum(f["origin"] == origin for f in have)
        some = "" if count == len(have) else f" in {count} of {len(have)} runs"
        whose = "the official ones" if origin == "official" else "generated by pathprox, not the official ones"
        notes.append(f"the corrupted images are {whose}{some}")
    absent = sorted({c for f in have for c in f.get("missing", ())})
    return [*notes, *([f"without the corruptions {', '.join(absent)}"] if absent else [])]
