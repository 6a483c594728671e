"""What is shown while a command works: bars, figures, one line for each run; and TensorBoard events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.record import DONE, Record, run_name
from pathprox.experiments.train import Watch


def bars(console: Console) -> Progress:
    """Narrow, so that the figures beside them fit into a terminal."""
    words, seen = TextColumn("{task.description}"), TextColumn("{task.fields[seen]}")
    return Progress(words, BarColumn(8), seen, TimeRemainingColumn(compact=True), console=console)


def latest(record: Record) -> str:
    """The newest entry of the history; F as it is and balanced."""
    now = {key: values[-1] for key, values in record.history.items()}
    objectives = f"F {now['objective']:.3f}/{now['balanced']:.3f} G {now['path_norm']:.3f}"
    return f"loss {now['loss']:.3f} {objectives} active {now['active']:.1f}% val {now['val']:.1f}%"


@contextmanager
def watching(recipe: Recipe, seed: int, tensorboard: Path | None = None) -> Iterator[Watch]:
    """A bar with loss, both objectives, active units and accuracy, and events if asked for."""
    with bars(Console(stderr=True)) as progress, _events(recipe, seed, tensorboard) as write:
        bar = progress.add_task(f"{recipe.name} seed {seed}", total=None, seen="")

        def watch(record: Record, step: int, total: int) -> None:
            progress.update(bar, completed=step, total=total, seen=latest(record))
            write(record)

        yield watch


@contextmanager
def _events(recipe: Recipe, seed: int, folder: Path | None) -> Iterator[Any]:
    if folder is None:
        yield lambda record: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    with SummaryWriter(str(folder / run_name(recipe, seed))) as writer:
        written = 0

        def write(record: Record) -> None:
            nonlocal written
            for i, step in list(enumerate(record.history["step"]))[written:]:
                for key, values in record.history.items():
                    if key != "step":
                        writer.add_scalar(key, values[i], int(step))
            written = len(record.history["step"])

        yield write


def line(record: Record) -> str:
    """A finished run in one line."""
    recipe = record.recipe
    head = f"{recipe.name} lr {recipe.lr:g} weight decay {recipe.weight_decay:g} seed {record.seed}: "
    if record.status != DONE:
        return f"{head}{record.status}: {record.message}"
    seen = "val {val:.2f}%  test {test:.2f}%  active {active:.1f}%".format(**record.final["best"])
    return f"{head}{seen}  ({record.seconds:.0f} s)"


def show(record: Record) -> str:
    """A run in a few lines: the paper's choice, the last looks, the corrupted set, the size."""
    recipe, final = record.recipe, record.final
    lines = [f"{METHODS[recipe.method].title}, {recipe.model} on {recipe.data}: {line(record)}"]
    if record.status != DONE:
        return lines[0]
    last = final["last"]
    lines.append(
        f"  mean of the last {last['looks']} looks: test {last['test']:.2f}%, active {last['active']:.1f}%, "
        f"balanced objective {last['balanced']:.4f}"
    )
    if "corrupted" in final:
        set_ = final["corrupted"]
        seen = f"{set_['mean']:.2f}% ({set_['origin']})" if "mean" in set_ else set_["absent"]
        lines.append(f"  {set_['name']}: {seen}")
    if "size" in final:
        size = final["size"]
        lines.append(f"  parameters {size['parameters']:,}, once shrunk {size['shrunk_parameters']:,}")
    lines += [
        f"  cut at step {p['checkpoint']:,}: {p['active']:.1f}% of the units, test {p['test']:.2f}%"
        for p in final.get("pruned", ())
    ]
    return "\n".join(lines)


def make_corrupted(
    name: str, data_dir: Path | None, seed: int, workers: int | None, extra: bool, console: Console
) -> dict[str, str]:
    """Make a corrupted set in the data folder; returns what could not be made, and why."""
    from pathprox.experiments.corruptions.make import make_cifar10_c, make_mnist_c
    from pathprox.experiments.data import CORRUPTED_NAMES, folder_of, load

    if name not in CORRUPTED_NAMES:
        raise ValueError(f"there is no corrupted set {name!r}: choose one of {', '.join(CORRUPTED_NAMES)}")
    folder = folder_of(data_dir)
    clean = load({"mnist-c": "mnist", "cifar10-c": "cifar10"}[name], data_dir, download=True).test
    images, labels = clean.images.numpy(), clean.labels.numpy()
    with bars(console) as progress:
        tasks: dict[str, Any] = {}

        def report(corruption: str, done: int, total: int) -> None:
            if corruption not in tasks:
                tasks[corruption] = progress.add_task(corruption, total=total, seen="")
            progress.update(tasks[corruption], completed=done)

        if name == "mnist-c":
            target = folder / "mnist_c-generated"
            return dict(make_mnist_c(images[:, 0], labels, target, seed=seed, workers=workers, progress=report))
        target, pictures = folder / "CIFAR-10-C-generated", folder / "frost"
        frost = pictures if pictures.is_dir() else None
        pixels = images.transpose(0, 2, 3, 1)
        options: dict[str, Any] = {"seed": seed, "workers": workers, "extra": extra, "frost": frost}
        return dict(make_cifar10_c(pixels, labels, target, progress=report, **options))
