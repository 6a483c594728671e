"""The commands that show what came out of runs: table, figure, report, reproduction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pathprox.experiments.options import FIGURES, RESULTS, Figures, Records, told

app = typer.Typer(no_args_is_help=True)


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
    out: Figures = FIGURES,
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
