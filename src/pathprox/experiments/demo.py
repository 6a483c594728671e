"""The demo: one small network trained twice from the same start, with weight decay and with PathProx."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

import pathprox
from pathprox.experiments.corruptions.make import make_mnist_c
from pathprox.experiments.data import load
from pathprox.experiments.live import bars, latest
from pathprox.experiments.loop import Setting
from pathprox.experiments.markup import Section, document, html_table, image, paragraph
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import RECIPES, Recipe
from pathprox.experiments.record import DONE, Record
from pathprox.experiments.train import Run
from pathprox.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LR, WEIGHT_DECAY = 0.1, 1e-2
"""Network, data and batches are those of the paper's Task 1; more weight decay, so that the zeros come soon."""


@dataclass(frozen=True)
class Outcome:
    """A trained network and the small one that was made of it."""

    record: Record
    small: nn.Module
    costs: Report

    def figures(self) -> dict[str, str]:
        """What the table says of it."""
        last = {key: values[-1] for key, values in self.record.history.items()}
        before, after = self.costs.before, self.costs.after
        return {
            "objective F": f"{last['objective']:.4f}",
            "F, balanced": f"{last['balanced']:.4f}",
            "active units": f"{last['active']:.1f}%",
            "test accuracy": f"{last['test']:.1f}%",
            "corrupted test images": f"{self.record.final['corrupted']['last_mean']:.1f}%",
            "parameters": f"{before.parameters:,}",
            "once shrunk": f"{after.parameters:,}",
            "file": f"{before.file_bytes / 1e6:.2f} MB",
            "shrunk file": f"{after.file_bytes / 1e6:.2f} MB",
            "100 images": f"{1e3 * before.latency:.2f} ms",
            "shrunk, 100 images": f"{1e3 * after.latency:.2f} ms ({self.costs.ratios['latency']:.1f}x faster)",
        }


def side_by_side(found: list[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a method in each column, its figures below it."""
    columns = ["", *(METHODS[result.record.recipe.method].title for result in found)]
    figures = [result.figures() for result in found]
    return columns, [[name, *(column[name] for column in figures)] for name in figures[0]]


def recipe_of(method: str, steps: int) -> Recipe:
    recipe = RECIPES["figure1/pathprox"].lasting(steps)
    changes = {"task": "demo", "data": "mnist-embedded", "corrupted": "mnist-c", "look_every": max(1, steps // 30)}
    return recipe.changed(method=method, lr=LR, weight_decay=WEIGHT_DECAY, **changes)


def run(out: Path, steps: int = 1500) -> list[Record]:
    """Train both, shrink, print a table; pictures, a page, the records and the small network go to ``out``."""
    console = Console()
    spoil(out / "data", console)
    runs = [
        Run(recipe_of(m, steps), 0, out / "records", Setting.of("cpu"), out / "data")
        for m in ("weight-decay", "pathprox")
    ]
    console.print(
        f"{runs[0].recipe.model}, 100 MNIST images a digit, weight_decay {WEIGHT_DECAY}, {steps} steps of SGD\n"
    )
    console.print(str(runs[0].loop.units), highlight=False)
    train(runs, console)
    found = [outcome(work) for work in runs]
    columns, rows = side_by_side(found)
    table = Table(*columns, title="after training")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    pathprox.save(found[1].small, out / "small.safetensors")
    draw([result.record for result in found], out)
    write_page(found, out, steps)
    for name, what in (
        ("report.html", "all of it on one page"),
        ("demo.png", "the curves"),
        ("robustness.png", "Lipschitz constants and corrupted images"),
        ("small.safetensors", "the small network, for pathprox.load"),
    ):
        console.print(f"{out / name}: {what}")
    return [result.record for result in found]


def spoil(folder: Path, console: Console) -> None:
    """The corrupted test images, made from the 2000 clean ones in the package."""
    clean = load("mnist-embedded").test
    with console.status("making fifteen kinds of corrupted test images"):
        make_mnist_c(clean.images[:, 0].numpy(), clean.labels.numpy(), folder / "mnist_c-generated", workers=1)


def train(runs: list[Run], console: Console) -> None:
    """Side by side, look by look."""
    with bars(console) as progress:
        steps = runs[0].recipe.steps
        rows = [progress.add_task(f"{METHODS[r.recipe.method].title:>12}", total=steps, seen="") for r in runs]
        waiting = [work.looks() for work in runs]
        for _ in zip(*waiting, strict=False):
            for work, row in zip(runs, rows, strict=True):
                progress.update(row, completed=work.step, seen=latest(work.record))
        for looks in waiting:
            list(looks)
    for work in runs:
        if work.record.status != DONE:
            raise FloatingPointError(f"{work.recipe.name}: {work.record.message}")


def outcome(work: Run) -> Outcome:
    model = work.loop.model
    small = pathprox.shrink(model, work.loop.units)
    batch = load("mnist-embedded").test.images[:100].float() / 255
    return Outcome(work.record, small, pathprox.report(model, small, batch))


def draw(records: list[Record], out: Path) -> None:
    """Two pictures: what training looked like, and how the networks bear disturbances."""
    import matplotlib
    from matplotlib.figure import Figure

    from pathprox.experiments.figures import LOOK

    with matplotlib.rc_context(LOOK):
        for name, paint in (("demo.png", _curves), ("robustness.png", _robustness)):
            figure = Figure(figsize=(12, 3.8), layout="constrained")
            paint(figure, {r.recipe.method: [r] for r in records})
            figure.savefig(out / name)


def _curves(figure: Figure, shown: dict[str, list[Record]]) -> None:
    from pathprox.experiments.figures_parts import BLACK, COLOURS, active_units, curve, key, objective, over_iterations

    left, middle, right = figure.subplots(1, 3)
    objective(left, shown)
    active_units(middle, shown)
    middle.set_ylim(0, 103)
    for method, runs in shown.items():
        curve(right, runs, "test", COLOURS[method])
    right.set_title("test accuracy (%)")
    over_iterations(right, shown)
    ends = [runs[0].history["test"][-1] for runs in shown.values()]
    right.set_ylim(min(ends) - 10, max(ends) + 2)
    handles = [key(COLOURS[m], METHODS[m].title, width=3) for m in shown]
    handles += [key(BLACK, "F, balanced"), key(BLACK, "F as it is", "--")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _robustness(figure: Figure, shown: dict[str, list[Record]]) -> None:
    from pathprox.experiments.figures_parts import COLOURS, lipschitz

    parts: Any = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    lipschitz(parts[0], shown)
    axes = parts[1].subplots()
    kinds = list(shown["pathprox"][0].final["corrupted"]["each"])
    for side, (method, runs) in zip((-0.2, 0.2), shown.items(), strict=True):
        each = runs[0].final["corrupted"]["each"]
        places = [i + side for i in range(len(kinds))]
        axes.bar(places, [each[k] for k in kinds], 0.4, color=COLOURS[method], label=METHODS[method].title)
    axes.set_xticks(range(len(kinds)), [k.replace("_", " ") for k in kinds], rotation=40, ha="right")
    axes.set(title="accuracy on corrupted test images (%), best network on validation", ylim=(0, 100))
    axes.legend(loc="upper right", ncols=2)


def write_page(found: list[Outcome], out: Path, steps: int) -> None:
    command = f"pathprox demo --out {out.name} --steps {steps}"
    intro = (
        "The same network on 1000 MNIST digits, from the same start and with the same batches, trained with weight "
        "decay and with PathProx; one seed, 2000 test images. F is the objective of weight decay; balanced: at the "
        "smallest representation of the function that was found."
    )
    sections = [
        Section("After training", paragraph(intro) + html_table(*side_by_side(found)), command),
        Section("While training", image(out / "demo.png", "Objective, active units and accuracy over the steps.")),
        Section("Robustness", image(out / "robustness.png", "Lipschitz constants, and accuracy for each corruption.")),
        Section("The small network", f"<pre>{found[1].costs}</pre>"),
    ]
    (out / "report.html").write_text(document("PathProx and weight decay", sections), encoding="utf-8")
