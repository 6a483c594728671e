"""The demo: one small network trained twice from the same start, with weight decay and with PathProx."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import pathprox
from pathprox.experiments.data import Split, mnist_subset
from pathprox.experiments.models import MLP

WEIGHT_DECAY, LR, BATCH, EVERY = 1e-2, 0.1, 200, 50
"""Network, data and batches of the paper's Task 1; more weight decay than there, so that the zeros come soon."""


@dataclass
class Curve:
    """What is seen while training, every `EVERY` steps."""

    name: str
    steps: list[int] = field(default_factory=list)
    balanced: list[float] = field(default_factory=list)
    """The weight-decay objective at the network's smallest representation."""
    active: list[float] = field(default_factory=list)
    """Share of units that are not exactly zero, in percent."""
    accuracy: list[float] = field(default_factory=list)
    """On the test images, in percent."""
    parameters: int = 0
    """Of the network once its dead units are removed."""


Method = Callable[[pathprox.Units, float], pathprox.Regularizer]
METHODS: dict[str, Method] = {"weight decay": pathprox.WeightDecay, "PathProx": pathprox.PathProx}


def run(out: Path, steps: int = 1500) -> list[Curve]:
    """Train, print a table, draw a picture into ``out``."""
    console = Console()
    data = mnist_subset()
    torch.manual_seed(0)
    start = MLP(3, 400, factorized=True)
    console.print(
        f"MLP-3-400 factorized, 100 MNIST images a digit, weight_decay {WEIGHT_DECAY}, {steps} steps of SGD\n"
    )
    console.print(str(pathprox.find_units(start, data["train"].images[:1])), highlight=False)
    bar = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"), TimeRemainingColumn()
    with Progress(*bar, console=console) as progress:
        curves = [train(name, method, start, data, steps, progress) for name, method in METHODS.items()]
    columns = "objective (balanced)", "active units", "test accuracy", "parameters once shrunk"
    table = Table("", *columns, title="after training")
    for curve in curves:
        last = f"{curve.balanced[-1]:.4f}", f"{curve.active[-1]:.1f}%", f"{curve.accuracy[-1]:.1f}%"
        table.add_row(curve.name, *last, f"{curve.parameters:,}")
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    draw(curves, out / "demo.png")
    console.print(f"the curves: {out / 'demo.png'}")
    return curves


def train(name: str, method: Method, start: nn.Module, data: dict[str, Split], steps: int, progress: Progress) -> Curve:
    """The same start and the same batches for every method."""
    model = copy.deepcopy(start)
    units = pathprox.find_units(model, data["train"].images[:1])
    optimizer = SGD(model.parameters(), lr=LR)
    method(units, WEIGHT_DECAY).attach(optimizer)
    schedule = CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(0)
    images, labels = data["train"].images, data["train"].labels
    curve, task = Curve(name), progress.add_task(f"{name:>12}", total=steps, seen="")
    for step in range(steps + 1):
        if step % EVERY == 0:
            look(curve, step, model, units, data)
            last = curve.balanced[-1], curve.active[-1], curve.accuracy[-1]
            seen = "objective {:.4f}  active {:5.1f}%  accuracy {:.1f}%".format(*last)
            progress.update(task, completed=step, seen=seen)
        if step == steps:
            break
        if step % (len(labels) // BATCH) == 0:
            batches = torch.randperm(len(labels), generator=order).split(BATCH)
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    curve.parameters = sum(p.numel() for p in pathprox.shrink(model, units).parameters())
    return curve


@torch.no_grad()
def look(curve: Curve, step: int, model: nn.Module, units: pathprox.Units, data: dict[str, Split]) -> None:
    loss = cross_entropy(model(data["train"].images), data["train"].labels)
    alive, count = units.count_active()
    right = model(data["test"].images).argmax(1) == data["test"].labels
    curve.steps.append(step)
    curve.balanced.append(pathprox.objective(units, loss, WEIGHT_DECAY).balanced)
    curve.active.append(100 * alive / count)
    curve.accuracy.append(100 * float(right.float().mean()))


def draw(curves: list[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "balanced": "weight-decay objective, balanced",
        "active": "active units (%)",
        "accuracy": "test accuracy (%)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for ax, (attribute, title) in zip(axes, panels.items(), strict=True):
        for curve, colour in zip(curves, ("#4878a8", "#c0392b"), strict=True):
            ax.plot(curve.steps, getattr(curve, attribute), label=curve.name, color=colour, linewidth=1.8)
        ax.set(title=title, xlabel="steps", xlim=(0, max(curves[0].steps)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    axes[0].set_yscale("log")
    axes[1].set_ylim(0, 105)
    axes[2].set_ylim(min(c.accuracy[-1] for c in curves) - 8, 100)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
