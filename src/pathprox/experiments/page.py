"""The report: all tables and figures of the paper and all runs behind them, as one web page that needs nothing else."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pathprox.experiments import claims, figures, paper, tables
from pathprox.experiments.choice import differences
from pathprox.experiments.markup import Section, bullets, document, html_table, image, paragraph
from pathprox.experiments.recipes import RECIPES
from pathprox.experiments.record import DONE, Record

__all__ = ["Section", "document", "html_table", "image", "page"]

ALTS = {
    1: "Three panels: the weight-decay objective over the iterations, histograms of local Lipschitz constants before "
    "and after training, and the share of active units over the iterations, for weight decay and PathProx.",
    2: "Decision boundaries in the plane for weight decay and PathProx after few steps, and after all of them.",
    3: "The weight-decay objective over the iterations for weight decay, PathProx and SGD on the path norm.",
    4: "Test accuracy against the share of active units for weight decay, lasso, group lasso and PathProx.",
}
RUNS = (
    "recipe",
    "lr",
    "weight decay",
    "seeds",
    "steps",
    "data",
    "status",
    "device",
    "precision",
    "seconds",
    "versions",
)


def page(records: Sequence[Record], chosen: str = "paper") -> str:
    """The page; what there are no records for is said with the command that makes them."""
    claimed = html_table(claims.COLUMNS, claims.claims(records)) + paragraph(claims.LEGEND, quiet=True)
    sections = [Section("In short", claimed), *(_table(number, records, chosen) for number in paper.TABLES)]
    sections += [_figure(number, records) for number in figures.FIGURES]
    return document("PathProx: the paper's experiments", [*sections, _runs(records)])


def _table(number: int, records: Sequence[Record], chosen: str) -> Section:
    made = tables.table(number, records, chosen)
    commands = f"{tables.commands(number, chosen)}\npathprox table {number} --records DIR --chosen {chosen}"
    return Section(made.title, made.html(), commands)


def _figure(number: int, records: Sequence[Record]) -> Section:
    title = f"Figure {number}: {figures.FIGURES[number].title}"
    body = paragraph("There are no records for it yet.")
    if figures.runs_of(number, records):
        with tempfile.TemporaryDirectory() as folder:
            (png,) = figures.draw(number, records, Path(folder), ["png"])
            body = image(png, ALTS[number])
    commands = f"{figures.commands(number)}\npathprox figure {number} --records DIR --out DIR"
    return Section(title, body + bullets(figures.notes(number, records)), commands)


def _runs(records: Sequence[Record]) -> Section:
    """A row for each recipe that was run, whatever came of it."""
    if not records:
        return Section("All runs", paragraph("There are none."))
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record.recipe.key, []).append(record)
    rows = sorted(_run(runs) for runs in cells.values())
    seconds = sum(r.seconds for r in records)
    told = f"{len(records)} runs, {seconds / 3600:.1f} hours of computing. † marks recipes that are not the paper's."
    failed = [f"{r.name}: {r.outcome}. {r.message}" for r in records if r.outcome != DONE]
    body = paragraph(told) + html_table(RUNS, rows) + bullets(failed)
    return Section("All runs", body, "pathprox report --records DIR --out report.html")


def _run(runs: Sequence[Record]) -> tuple[str, ...]:
    recipe = runs[0].recipe
    outcomes = Counter(r.outcome for r in runs)
    own = recipe.name not in RECIPES or any(differences(r) for r in runs)
    return (
        f"{recipe.name}{' †' if own else ''}",
        f"{recipe.lr:g}",
        f"{recipe.weight_decay:g}",
        ", ".join(str(s) for s in sorted(r.seed for r in runs)),
        f"{recipe.steps:,}",
        recipe.data,
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
        _distinct([r.device for r in runs]),
        _distinct([r.precision for r in runs]),
        f"{sum(r.seconds for r in runs):,.0f}",
        _distinct([", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in runs]),
    )


def _distinct(words: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(words))
