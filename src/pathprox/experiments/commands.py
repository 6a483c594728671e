"""The commands of the paper's experiments: recipes, train, sweep, demo, and those about data and results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pathprox.experiments import commands_data, commands_results
from pathprox.experiments.choice import named
from pathprox.experiments.methods import METHODS
from pathprox.experiments.options import (
    FIGURES,
    RESULTS,
    RUNS,
    Compiled,
    DataDir,
    DataName,
    Decay,
    Device,
    Epochs,
    Figures,
    Jobs,
    Longer,
    Network,
    Precision,
    Records,
    Seeds,
    Steps,
    told,
)
from pathprox.experiments.recipes import RECIPES, Grid, Recipe, grid, neighbours

if TYPE_CHECKING:
    from pathprox.experiments.record import Record
    from pathprox.experiments.sweep import Pool, Work

app = typer.Typer(no_args_is_help=True)
app.add_typer(commands_results.app)
app.add_typer(commands_data.app, name="data")


def varied(
    recipe: Recipe,
    steps: int | None,
    epochs: int | None,
    name: str | None,
    data_dir: Path | None,
    network: str | None = None,
    decay: bool = False,
    keep_milestones: bool = False,
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
    if steps is None:
        return recipe
    return recipe.until(steps) if keep_milestones else recipe.lasting(steps)


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
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient; default: any.")] = None,
    batch: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    look_every: Annotated[int | None, typer.Option(help="Steps between two evaluations.")] = None,
    lipschitz_curve: Annotated[
        bool, typer.Option("--lipschitz-curve", help="Measure the median local Lipschitz constant each time.")
    ] = False,
    steps: Steps = None,
    epochs: Epochs = None,
    data_name: DataName = None,
    network: Network = None,
    decay: Decay = False,
    keep_milestones: Longer = False,
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
        recipe = varied(named(name), steps, epochs, data_name, data_dir, network, decay, keep_milestones)
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "clip": clip, "batch": batch}
        own |= {"look_every": look_every, "lipschitz_curve": lipschitz_curve}
        recipe = recipe.changed(**{key: value for key, value in own.items() if value is not None})
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
        str,
        typer.Option(
            "--grid",
            help="paper, chosen (the paper's choice alone), neighbours (and the cells beside it), "
            "or 'lr=0.1,0.3 weight_decay=1e-3'.",
        ),
    ] = "paper",
    seeds: Seeds = RUNS,
    jobs: Jobs = 1,
    batched: Annotated[bool, typer.Option("--batched", help="Train the cells as one program; MLPs only.")] = False,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster, or local; --jobs actors.")] = None,
    gpus: Annotated[float, typer.Option(help="Of a GPU for each Ray actor, like 0.25.")] = 0.0,
    steps: Steps = None,
    epochs: Epochs = None,
    data_name: DataName = None,
    network: Network = None,
    decay: Decay = False,
    keep_milestones: Longer = False,
    records: Records = RESULTS,
    data_dir: DataDir = None,
    device: Device = None,
    precision: Precision = None,
    compiled: Compiled = False,
) -> None:
    """Search a grid with one seed, choose by validation accuracy, repeat the choice with other seeds."""
    from pathprox.experiments import sweep as sweeps
    from pathprox.experiments.batched import Batched

    with told():
        recipe = varied(named(f"{task}/{method}"), steps, epochs, data_name, data_dir, network, decay, keep_milestones)
        wanted = cells_of(cells, recipe)
        work = sweeps.Work(records, data_dir, device, precision, compiled)
        pool = pool_for(wanted, seeds, jobs, work)
        if batched:
            pool = Batched()
        if ray is not None:
            pool = sweeps.Ray(ray, jobs, gpus)
        found = sweeps.sweep(wanted, range(seeds), work, pool, tell)
        if len(wanted) > 1 and not recipe.prune:
            best = sweeps.chosen(wanted, found)
            by = "the balanced objective" if task == "figure3" else "validation accuracy"
            typer.echo(f"chosen by {by}: lr {best.lr:g}, weight decay {best.weight_decay:g}")


@app.command()
def run(
    what: Annotated[list[str], typer.Argument(help="table1 ... table3, figure1 ... figure4, grids; or all.")],
    seeds: Seeds = RUNS,
    jobs: Jobs = 1,
    steps: Steps = None,
    records: Records = RESULTS,
    out: Figures = FIGURES,
    data_dir: DataDir = None,
    device: Device = None,
    precision: Precision = None,
    compiled: Compiled = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only say what has no record.")] = False,
) -> None:
    """Run what tables and figures of the paper take and have no record of, then show them."""
    from pathprox.experiments import plan
    from pathprox.experiments.sweep import Work

    with told():
        wanted = plan.plan_of(what)
        wanted = wanted if steps is None else wanted.lasting(steps)
        if dry:
            lacking = wanted.lacking(range(seeds), records)
            for recipe, seed in lacking:
                typer.echo(f"{recipe.name} lr {recipe.lr:g} weight decay {recipe.weight_decay:g} seed {seed}")
            typer.echo(f"{len(lacking)} without a record")
            return
        work = Work(records, data_dir, device, precision, compiled)
        wanted.run(range(seeds), work, pool_for(wanted.recipes, seeds, jobs, work), tell)
    for name in plan.PLANS if "all" in what else what:
        if name.startswith("table"):
            commands_results.table(int(name[-1]), records)
        if name.startswith("figure"):
            commands_results.figure(int(name[-1]), records, out)


def cells_of(text: str, recipe: Recipe) -> list[Recipe]:
    """What --grid asks for."""
    known = {"paper": grid, "chosen": lambda recipe: [recipe], "neighbours": neighbours}
    return known[text](recipe) if text in known else grid(recipe, parse_grid(text))


def pool_for(recipes: Sequence[Recipe], seeds: int, jobs: int, work: Work) -> Pool:
    """So many runs at a time. The data are there afterwards: several processes would fetch them several times."""
    from pathprox.experiments import sweep as sweeps
    from pathprox.experiments.data import load

    if seeds < 1 or jobs < 1:
        raise ValueError(f"--seeds and --jobs are 1 or more, got {seeds} and {jobs}")
    for name in dict.fromkeys(recipe.data for recipe in recipes):
        load(name, work.data_dir, download=True)
    work.folder.mkdir(parents=True, exist_ok=True)
    return sweeps.in_turn if jobs == 1 else sweeps.Processes(jobs)


def tell(record: Record, number: int, of: int) -> None:
    """A finished run, in a line."""
    from pathprox.experiments.live import line

    typer.echo(f"[{number}/{of}] {line(record)}")


def parse_grid(text: str) -> Grid:
    """From text like ``lr=0.1,0.3 weight_decay=0.001``."""
    try:
        found = {key: tuple(map(float, values.split(","))) for key, values in (p.split("=") for p in text.split())}
        return Grid(**found)
    except (ValueError, TypeError):
        raise ValueError(
            f"--grid {text!r} is not a grid: write paper, chosen, neighbours, or lists like "
            "'lr=0.1,0.3 weight_decay=0.001,0.01'"
        ) from None


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps of each method.")] = 1500,
) -> None:
    """Train a small network on real MNIST digits with weight decay and with PathProx, from the same start."""
    from pathprox.experiments.demo import run

    run(out, steps)
