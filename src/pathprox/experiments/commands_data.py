"""The commands about data sets: which there are, fetch them, make the corrupted ones."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pathprox.experiments.options import DataDir, told

app = typer.Typer(no_args_is_help=True, help="The data sets: what is there, fetch them, make the corrupted ones.")


@app.command("list")
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


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, svhn, mnist-c or cifar10-c.")], data_dir: DataDir = None
) -> None:
    """Download a data set, checked by its hash."""
    from pathprox.experiments.data import fetch as download

    with told():
        for path in download(name, data_dir):
            typer.echo(str(path))


@app.command()
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
