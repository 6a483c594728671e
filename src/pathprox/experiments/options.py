"""What several commands share: options, and how mistakes are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pathprox.experiments.recipes import SEEDS

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
Longer = Annotated[
    bool, typer.Option("--keep-milestones", help="With --steps or --epochs: only the end moves, not the milestones.")
]
Compiled = Annotated[bool, typer.Option("--compile", help="Train through torch.compile.")]
Jobs = Annotated[int, typer.Option(help="Runs at a time on this device.")]
Seeds = Annotated[int, typer.Option(help="Runs of each cell, or of the one that a search chooses.")]
Figures = Annotated[Path, typer.Option("--out", help="Folder for the PNG and the PDF of a figure.")]
RESULTS, FIGURES = Path("results"), Path("figures")
RUNS = len(SEEDS)
"""As in the paper."""


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
