"""The commands of the paper's experiments: data, recipes, train, sweep, table, figure, report, reproduction, demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pathprox.experiments.choice import named
from pathprox.experiments.recipes import METHODS, RECIPES, SEEDS, Grid, Recipe, grid

app = typer.Typer(no_args_is_help=True)
data = typer.Typer(no_args_is_help=True, help="The data sets: what is there, fetch them, make the corrupted ones.")
app.add_typer(data, name="data")

Records = Annotated[Path, typer.Option("--records", help="Folder of the records.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data sets; default $PATHPROX_DATA, then the user's cache.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default the GPU where there is one.")]
Precision = Annotated[str | None, typer.Option(help="float32, tf32 or bf16; default tf32 on a GPU, else float32.")]
Steps = Annotated[int | None, typer.Option(help="Another length; milestones and checkpoints move along.")]
Epochs = Annotated[int | None, typer.Option(help="The same, in passes through the training images.")]
DataName = Annotated[
    str | None, typer.Option("--data", help="Another data set, like mnist-embedded, which needs no files.")
]
Network = Annotated[str | None, typer.Option(help="Another network, like 'MLP-3-800 factorized'.")]
Decay = Annotated[bool, typer.Option("--decay", help="Learning rate / 10 at half and at three quarters of the run.")]
Compiled = Annotated[bool, typer.Option("--compile", help="Train through torch.compile.")]
RESULTS = Path("results")


@contextmanager
def told() -> Iterator[None]:
    """Mistakes of the user, and what is missing, in one line and without a traceback."""
    from pathprox.experiments.sweep import CellError
    from pathprox.experiments.train import UnfinishedError

    try:
        yield
    except (ValueError, OSError, ImportError, UnfinishedError, CellError) as error:
        typer.echo(f"pathprox: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command with --resume (a sweep: as it is) goes on.", err=True)
        raise typer.Exit(130) from None


def varied(
    recipe: Recipe,
    steps: int | None,
    epochs: int | None,
    name: str | None,
    data_dir: Path | None,
    network: str | None = None,
    decay: bool = False,
) -> Recipe:
    """The recipe at another length, on other data, with another network or with a decaying learning rate."""
    from pathprox.experiments.data import load

    if name is not None:
        recipe = recipe.changed(data=name)
    if network is not None:
        recipe = recipe.changed(model=network)
    if decay:
        recipe = recipe.changed(milestones=(recipe.steps // 2, recipe.steps * 3 // 4))
    if epochs is not None:
        if steps is not None:
            raise ValueError("--steps and --epochs say the same thing twice; give one of them")
        steps = epochs * (len(load(recipe.data, data_dir, download=True).train) // recipe.batch)
    return recipe if steps is None else recipe.lasting(steps)


@app.command()
def recipes(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """List the paper's experiments with the hyperparameters it chose."""
    from pathprox.text import table

    if as_json:
        typer.echo(json.dumps({name: recipe.to_dict() for name, recipe in RECIPES.items()}, indent=2))
        return
    head = "recipe", "network", "data", "lr", "weight decay", "batch", "steps"
    rows = [
        (name, r.model, r.data, f"{r.lr:g}", f"{r.weight_decay:g}", str(r.batch), f"{r.steps:,}")
        for name, r in RECIPES.items()
    ]
    typer.echo("\n".join(table(head, rows)))
    typer.echo(f"\nmethods: {', '.join(METHODS)}. Any of them runs on any task: pathprox train task1/lasso")


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="A recipe, like task1/pathprox; see `pathprox recipes`.")],
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable; default 0.")] = None,
    lr: Annotated[float | None, typer.Option(help="In place of the recipe's.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="In place of the recipe's.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of SGD; the paper has none.")] = None,
    batch: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    steps: Steps = None,
    epochs: Epochs = None,
    data_name: DataName = None,
    network: Network = None,
    decay: Decay = False,
    records: Records = RESULTS,
    data_dir: DataDir = None,
    device: Device = None,
    precision: Precision = None,
    compiled: Compiled = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Start over even if there is a record.")] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard events.")] = None,
) -> None:
    """Run one cell of the paper and write its record."""
    from pathprox.experiments.live import show, watching
    from pathprox.experiments.loop import Setting
    from pathprox.experiments.train import run

    with told():
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "batch": batch}
        recipe = named(name).changed(**{key: value for key, value in own.items() if value is not None})
        recipe = varied(recipe, steps, epochs, data_name, data_dir, network, decay)
        setting = Setting.of(device, precision, compiled)
        for number in seed or [0]:
            with watching(recipe, number, tensorboard) as watch:
                options: dict[str, Any] = {"resume": resume, "again": again, "watch": watch}
                record = run(recipe, number, records, setting=setting, data_dir=data_dir, **options)
            typer.echo(show(record))
            typer.echo(f"record: {records / record.name}.json")


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="task1 ... task5, figure1 ... figure3, task2-decay, task5-decay.")],
    method: Annotated[str, typer.Option(help="A method; see `pathprox recipes`.")] = "pathprox",
    cells: Annotated[
        str, typer.Option("--grid", help="paper, chosen (the paper's choice alone), or 'lr=0.1,0.3 weight_decay=1e-3'.")
    ] = "paper",
    seeds: Annotated[int, typer.Option(help="Runs of the chosen cell, the one in the grid included.")] = len(SEEDS),
    jobs: Annotated[int, typer.Option(help="Runs at a time on this device.")] = 1,
    batched: Annotated[bool, typer.Option("--batched", help="Train the cells as one program; MLPs only.")] = False,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster, or local; --jobs actors.")] = None,
    gpus: Annotated[float, typer.Option(help="Of a GPU for each Ray actor, like 0.25.")] = 0.0,
    steps: Steps = None,
    epochs: Epochs = None,
    data_name: DataName = None,
    network: Network = None,
    decay: Decay = False,
    records: Records = RESULTS,
    data_dir: DataDir = None,
    device: Device = None,
    precision: Precision = None,
    compiled: Compiled = False,
) -> None:
    """Search a grid with one seed, choose by validation accuracy, repeat the choice with other seeds."""
    from pathprox.experiments import sweep as sweeps
    from pathprox.experiments.batched import Batched
    from pathprox.experiments.data import load
    from pathprox.experiments.live import line

    with told():
        if seeds < 1 or jobs < 1:
            raise ValueError(f"--seeds and --jobs are 1 or more, got {seeds} and {jobs}")
        recipe = varied(named(f"{task}/{method}"), steps, epochs, data_name, data_dir, network, decay)
        wanted = [recipe] if cells == "chosen" else grid(recipe, None if cells == "paper" else parse_grid(cells))
        load(recipe.data, data_dir, download=True)  # once, before several processes would
        records.mkdir(parents=True, exist_ok=True)
        pool: sweeps.Pool = sweeps.in_turn if jobs == 1 else sweeps.Processes(jobs)
        if batched:
            pool = Batched()
        if ray is not None:
            pool = sweeps.Ray(ray, jobs, gpus)
        work = sweeps.Work(records.resolve(), data_dir and data_dir.resolve(), device, precision, compiled)
        found = sweeps.sweep(wanted, range(seeds), work, pool, lambda r, n, of: typer.echo(f"[{n}/{of}] {line(r)}"))
        if len(wanted) > 1 and not recipe.prune:
            best = sweeps.chosen(wanted, found)
            by = "the balanced objective" if task == "figure3" else "validation accuracy"
            typer.echo(f"chosen by {by}: lr {best.lr:g}, weight decay {best.weight_decay:g}")


def parse_grid(text: str) -> Grid:
    """From text like ``lr=0.1,0.3 weight_decay=0.001``."""
    try:
        found = {key: tuple(map(float, values.split(","))) for key, values in (p.split("=") for p in text.split())}
        return Grid(**found)
    except (ValueError, TypeError):
        raise ValueError(
            f"--grid {text!r} is not a grid: write paper, chosen, or lists like 'lr=0.1,0.3 weight_decay=0.001,0.01'"
        ) from None


@app.command()
def table(
    number: Annotated[int, typer.Argument(help="1 (generalization), 2 (weight normalisation), 3 (layer balance).")],
    records: Records = RESULTS,
    kind: Annotated[str, typer.Option("--format", help="text, markdown or csv.")] = "text",
    chosen: Annotated[str, typer.Option(help="Hyperparameters: paper (its choice) or validation (ours).")] = "paper",
) -> None:
    """Print a table of the paper with our numbers beside its own, and what is missing."""
    from pathprox.experiments import tables
    from pathprox.experiments.record import read_all

    with told():
        if kind not in ("text", "markdown", "csv"):
            raise ValueError(f"--format {kind!r} is none of text, markdown, csv")
        made = tables.table(number, read_all(records), chosen)
        typer.echo(getattr(made, kind)())


@app.command()
def figure(
    number: Annotated[int, typer.Argument(help="1, 2, 3 or 4.")],
    records: Records = RESULTS,
    out: Annotated[Path, typer.Option(help="Folder for the PNG and the PDF.")] = Path("figures"),
) -> None:
    """Draw a figure of the paper from the records."""
    from pathprox.experiments.figures import draw
    from pathprox.experiments.record import read_all

    with told():
        out.mkdir(parents=True, exist_ok=True)
        for path in draw(number, read_all(records), out):
            typer.echo(str(path))


@app.command()
def report(
    records: Records = RESULTS,
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    chosen: Annotated[str, typer.Option(help="Hyperparameters: paper or validation.")] = "paper",
) -> None:
    """Gather all tables and figures in one self-contained HTML page."""
    from pathprox.experiments.page import page
    from pathprox.experiments.record import read_all

    with told():
        text = page(read_all(records), chosen)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        typer.echo(str(out))


@app.command()
def reproduction(
    records: Records = RESULTS,
    out: Annotated[Path, typer.Option(help="The Markdown file; figures go beside it.")] = Path("docs/reproduction.md"),
) -> None:
    """Write the page that says which of the paper's numbers were met again, from the records."""
    from pathprox.experiments.reproduction import write

    with told():
        typer.echo(str(write(records, out)))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps of each method.")] = 1500,
) -> None:
    """Train a small network on real MNIST digits with weight decay and with PathProx, from the same start."""
    from pathprox.experiments.demo import run

    run(out, steps)


@data.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """Say which data sets are there, and what is missing."""
    from pathprox.experiments.data import CORRUPTED_NAMES, NAMES, corrupted, folder_of, load

    typer.echo(f"data folder: {folder_of(data_dir)}")
    for name in NAMES:
        try:
            found = load(name, data_dir)
            sizes = " / ".join(f"{len(s):,}" for s in (found.train, found.val, found.test))
            typer.echo(f"  {name:15} {sizes} for training / validation / test ({found.origin})")
        except (OSError, ValueError) as error:
            typer.echo(f"  {name:15} {str(error).splitlines()[0]}")
    for name in CORRUPTED_NAMES:
        try:
            there = corrupted(name, data_dir)
            without = f", without {', '.join(there.missing)}" if there.missing else ""
            typer.echo(f"  {name:15} {len(there.corruptions)} corruptions, {there.origin}{without}")
        except (OSError, ValueError) as error:
            typer.echo(f"  {name:15} {str(error).split('. ')[0]}")


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, svhn, mnist-c or cifar10-c.")], data_dir: DataDir = None
) -> None:
    """Download a data set, checked by its hash."""
    from pathprox.experiments.data import fetch as download

    with told():
        for path in download(name, data_dir):
            typer.echo(str(path))


@data.command()
def make(
    name: Annotated[str, typer.Argument(help="mnist-c or cifar10-c.")],
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; default one for each core.")] = None,
    extra: Annotated[bool, typer.Option("--extra", help="CIFAR-10-C: the four extra corruptions too.")] = False,
) -> None:
    """Make a corrupted test set from the clean one."""
    from pathprox.experiments.live import make_corrupted

    with told():
        lacking = make_corrupted(name, data_dir, seed, workers, extra, Console(stderr=True))
        for corruption, reason in lacking.items():
            typer.echo(f"not made: {corruption}: {reason}")
