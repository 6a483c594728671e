"""The page docs/reproduction.md: the paper's numbers beside ours, with a verdict, from the records and nothing else.

What people have to say about a number, and why one was not met, they write in reproduction_notes.md beside the page:
a heading ``## KEY`` for each section or cell, and prose below it. An unknown key is an error that lists the known.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathprox.experiments import claims, figures, paper, run_tables, tables, verdicts
from pathprox.experiments import convergence_tables as convergence
from pathprox.experiments.choice import of_paper, sweep, train
from pathprox.experiments.convergence_tables import NO_RECORD, task_title
from pathprox.experiments.methods import METHODS
from pathprox.experiments.page import ALTS
from pathprox.experiments.recipes import GRIDS
from pathprox.experiments.record import Record, read_all

PRECISION = "precision"
"""Folder beside the tasks with a folder of records for each precision that a cell was run at once more."""
NOTES = "reproduction_notes.md"
FIGURES = "figures"


@dataclass(frozen=True)
class Section:
    """A part of the page, and where its numbers come from."""

    key: str
    title: str
    blocks: Sequence[str]
    """Markdown, without what people wrote."""
    commands: Sequence[str] = ()
    folders: Sequence[str] = ()
    """Below the folder of the records."""
    cells: Sequence[str] = ()
    """Keys of what people may have written about single rows."""

    def markdown(self, notes: Mapping[str, str], folder: str, there: Container[str]) -> str:
        """``there``: the folders that exist, which can be linked to."""
        own = [notes[self.key]] if self.key in notes else []
        about = _bullets([f"*{cell}*: {notes[cell]}" for cell in self.cells if cell in notes])
        places = [f"[`{name}`]({folder}/{name})" if name in there else f"`{name}`" for name in self.folders]
        source = [f"Records: {', '.join(places)}."] if places else []
        made = _details("The commands that make them", "\n".join(["```", *self.commands, "```"]))
        blocks = [f"## {self.title}", *self.blocks, *own, about, *source, made if self.commands else ""]
        return "\n\n".join(block for block in blocks if block)


def write(folder: Path, out: Path) -> Path:
    """Make the page and its figures from the records in ``folder``."""
    records = read_all(folder)
    drawn = [number for number in figures.FIGURES if figures.runs_of(number, records)]
    for number in drawn:
        figures.draw(number, records, out.parent / FIGURES, ["png"])
    again = [r for path in sorted((folder / PRECISION).glob("*/")) for r in read_all(path)]
    notes = out.with_name(NOTES)
    found = read_notes(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    link = Path(os.path.relpath(folder, out.parent)).as_posix()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(records, again=again, notes=found, folder=link), encoding="utf-8")
    return out


def page(
    records: Sequence[Record],
    *,
    again: Sequence[Record] = (),
    notes: Mapping[str, str] | None = None,
    folder: str = "../results",
) -> str:
    """The page as Markdown. ``again``: runs at other precisions; ``folder``: the records, as seen from the page."""
    sections = [
        *(_table(number, records) for number in paper.TABLES),
        _sizes(records),
        _corrupted(records),
        _looks(records),
        _grids(records),
        _objective(records),
        *_limits(records),
        _precision(records, again),
        *(_figure(number, records) for number in figures.FIGURES),
    ]
    known = [key for section in sections for key in (section.key, *section.cells)]
    if unknown := sorted(set(notes or ()) - set(known)):
        names = "; ".join(dict.fromkeys(known))
        raise ValueError(f"no part of the page is called {'; '.join(unknown)}. There are: {names}")
    there = {r.recipe.task for r in records} | ({PRECISION} if again else set())
    parts = [_opening(records), *(section.markdown(notes or {}, folder, there) for section in sections)]
    return "\n\n".join(parts) + "\n"


def read_notes(text: str) -> dict[str, str]:
    """What is written below each heading ``## KEY``; what stands above the first is for those who write."""
    parts = [part.partition("\n") for part in f"\n{text}".split("\n## ")[1:]]
    return {key.strip(): prose.strip() for key, _, prose in parts if prose.strip()}


def _opening(records: Sequence[Record]) -> str:
    told = _bullets([*verdicts.tally(records), _claim(records)])
    return f"""# The paper's numbers, met again or not

This page is written by `pathprox reproduction` from the records of runs; change it by making records, or by writing in
[{NOTES}]({NOTES}). {_stock(records)}

## In short

{tables.markdown_table(claims.COLUMNS, claims.claims(records))}

{claims.LEGEND}

{told}

## How it is judged

{_bullets(verdicts.RULES)}

Accuracies and shares are percentages, mean ± standard error over n seeds. *best*: at the best validation accuracy.
*late*: mean over the last tenth of the looks; of accuracies on corrupted images, those of the last network. *active*:
units that are not zero. *in s.e.*: ours less the paper's, in standard errors."""


def _stock(records: Sequence[Record]) -> str:
    """How many records there are, and what they were made with."""
    if not records:
        return "There are no records yet."
    outcomes = Counter(r.outcome for r in records)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    made = sorted({f"{r.device}, {r.precision}, torch {r.versions.get('torch', 'unknown')}" for r in records})
    return f"There are {len(records)} of them: {counts} ({'; '.join(made)})."


def _claim(records: Sequence[Record]) -> str:
    outcomes = [race.outcome for task in convergence.ORDER for race in convergence.counted(task, records)]
    if not outcomes:
        return f"The objective F: {NO_RECORD} of weight decay and PathProx in the same cell."
    soon, never = outcomes.count(convergence.SOON), outcomes.count(convergence.NEVER)
    return (
        f"The objective F: PathProx is where weight decay ends after a third of the iterations or less in {soon} of "
        f"{len(outcomes)} cells, and never in {never}."
    )


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if body else ""


def _tasks(names: Iterable[str]) -> list[str]:
    """The tasks of recipes, each once."""
    return sorted({name.split("/")[0] for name in names})


# The sections.


def _table(number: int, records: Sequence[Record]) -> Section:
    found = paper.TABLES[number]
    return Section(
        f"table {number}",
        f"Table {number}: {paper.TITLES[number]}",
        [verdicts.verdict_table(number, records), _bullets(tables.table(number, records).notes)],
        tables.commands(number).splitlines(),
        list(dict.fromkeys(cell.task for cell in found)),
        [f"{cell.task}/{cell.method}, {cell.modification}" for cell in found],
    )


def _sizes(records: Sequence[Record]) -> Section:
    told = "Of the network with the best validation accuracy, as trained and after `pathprox.shrink`; one image."
    names = paper.names(1)
    blocks = [told, run_tables.size_table(records)]
    return Section("size", "Size after shrinking", blocks, [*map(train, names)], _tasks(names))


def _corrupted(records: Sequence[Record]) -> Section:
    told = (
        "Accuracy of the network with the best validation accuracy at each severity, over all corruptions, and over "
        "all severities; MNIST-C has only one. *images*: the official ones, or generated by `pathprox data make`."
    )
    names = [name for name in paper.names(1) if not name.startswith("task4")]
    blocks = [told, run_tables.corrupted_table(records)]
    return Section("corrupted images", "Corrupted images by severity", blocks, [*map(train, names)], _tasks(names))


def _looks(records: Sequence[Record]) -> Section:
    told = (
        "The look with the best validation accuracy, by which the paper chooses, among all looks of a run (as in the "
        "tables above) and among the late ones, after the learning rate has fallen for the last time. *augmented*: "
        "among all looks by the accuracy on validation images that are cropped and flipped as the training images "
        "are, by which the authors' public code chooses; n where not all runs have it. *highest*: the highest accuracy "
        "on test images of any look. Nothing is chosen by it; no way of choosing looks could give more."
    )
    names = paper.names(*paper.TABLES)
    blocks = [told, run_tables.look_table(records) or f"There is {NO_RECORD}."]
    return Section("looks", "Which look is the best", blocks, [*map(train, names)], _tasks(names))


def _grids(records: Sequence[Record]) -> Section:
    told = (
        "Each cell with one seed; the choice is the cell with the best validation accuracy (bold), and is repeated "
        "with other seeds. Where the first seed did not end as it should, the cell shows the lowest that did and names "
        "it; it has no say in the choice. Task 5 has no choice in the paper: Figure 4 is made of all its cells."
    )
    blocks = [told]
    for task in run_tables.GRID_TASKS:
        blocks += [f"### {task_title(task)}", run_tables.grid_summary(task, records)]
        for method in run_tables.grid_methods(task, records):
            title = f"{METHODS[method].title}: validation accuracy / test accuracy / active share"
            blocks.append(_details(title, run_tables.grid_table(task, method, records)))
    names = [f"{t}/{method}" for t in run_tables.GRID_TASKS for method in run_tables.grid_methods(t, records)]
    return Section("grids", "Hyperparameter grids", blocks, [*map(sweep, names)], run_tables.GRID_TASKS)


def _objective(records: Sequence[Record]) -> Section:
    told = (
        "F is the objective of weight decay, evaluated for every method: of the weights as they are, and *balanced*, "
        "at its least over all rescalings that leave the function alone. It depends on the weight decay, so only runs "
        "with the same one are compared, with the same learning rate and from the same start (the same seed); Task 5 "
        "starts from two networks, for PathProx trains the factorized form. *there after*: the iterations, at the "
        "first look, after which a method's balanced F is at or below the one that weight decay ends with; the slowest "
        f"seed counts. A run whose F ends at more than {convergence.LOST:g} times its least has blown up; cells in "
        "which weight decay itself does are left out.",
        "The claim: PathProx is there after a third of the iterations or less.",
    )
    blocks = [*told, tables.markdown_table(convergence.SUMMARY, convergence.summary_rows(records))]
    for task in convergence.ORDER:
        found = convergence.races(task, records)
        blocks.append(_details(f"{task_title(task)}, cell by cell", convergence.race_table(found) if found else ""))
    if best := convergence.best_races(records):
        blocks += [
            "Figure 3 with the learning rate that is best for each (weight decay's first):",
            convergence.race_table(best),
        ]
    names = [f"{task}/{m}" for task in convergence.ORDER for m in ("weight-decay", "pathprox")]
    made = [(sweep if name.split("/")[0] in GRIDS else train)(name) for name in names]
    return Section("objective", "The objective", blocks, made, convergence.ORDER)


def _limits(records: Sequence[Record]) -> list[Section]:
    """What the algorithm does not do, and what was tried besides."""
    slow = "The cells of the section above in which PathProx is not there after a third of the run."
    swings = (
        "Units come and go from one look to the next, so the share at a single look says little. *spread*: standard "
        "deviation over the looks, mean over the seeds; lowest, highest and jumps are the extremes of all seeds."
    )
    names = [name for name in paper.names(1, 3) if "pathprox" in name]
    moved, other = run_tables.with_momentum(records), run_tables.in_other_ways(records)
    variants = [f"task3/{m}" for m in METHODS if m.startswith("pathprox-") and m not in of_paper("task3")]
    return [
        Section(
            "slow",
            "What the algorithm does not do: lower F sooner, always",
            [slow, convergence.slow_table(records) or "There is none among those with records."],
        ),
        Section(
            "swings",
            "What the algorithm does not do: settle which units are active",
            [swings, convergence.swing_table(records) or f"There is {NO_RECORD}."],
            [*map(train, names)],
            _tasks(names),
        ),
        Section(
            "momentum",
            "Momentum",
            ["The paper has none.", run_tables.beside(records, moved) or f"There is {NO_RECORD} with momentum."],
            run_tables.reruns(moved) or ["pathprox train task3/pathprox --momentum 0.9 --lr 0.01"],
            _tasks(r.recipe.name for r in moved) or ["task3"],
        ),
        Section(
            "other ways",
            "Tried again in other ways",
            ["What is not the paper's.", run_tables.beside(records, other) or f"There is {NO_RECORD}."],
            run_tables.reruns(other) or [*map(train, variants)],
            _tasks(r.recipe.name for r in other) or ["task3"],
        ),
    ]


def _precision(records: Sequence[Record], again: Sequence[Record]) -> Section:
    told = f"The same runs at other precisions lie in folders of their own, `{PRECISION}/tf32` and the like."
    found = run_tables.precision_table([*records, *again]) or f"There is {NO_RECORD} of one cell at two precisions."
    runs = {p: run_tables.reruns([r for r in again if r.precision == p]) for p in sorted({r.precision for r in again})}
    made = [
        f"{run} --precision {precision} --records results/{PRECISION}/{precision}"
        for precision, commands in (runs or {"tf32": [train("task3/pathprox")]}).items()
        for run in commands
    ]
    return Section("precision", "Precision", [told, found], made, [PRECISION])


def _figure(number: int, records: Sequence[Record]) -> Section:
    kind = figures.FIGURES[number]
    there = bool(figures.runs_of(number, records))
    picture = f"![{ALTS[number]}]({FIGURES}/figure{number}.png)" if there else f"There is {NO_RECORD}."
    made = [*figures.commands(number).splitlines(), f"pathprox figure {number}"]
    blocks = [picture, _beside_figure(number, records), _bullets(figures.notes(number, records))]
    return Section(f"figure {number}", f"Figure {number}: {kind.title}", blocks, made, [kind.task])


def _beside_figure(number: int, records: Sequence[Record]) -> str:
    """What a figure shows, in numbers."""
    if number == 4:
        return run_tables.cut_table(records)
    table = convergence.lipschitz_table(records) if number == 1 else ""
    return f"Median local Lipschitz constants on the way, and test accuracy:\n\n{table}" if table else ""
