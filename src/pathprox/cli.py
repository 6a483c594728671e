"""`pathprox ...`: what units a model has, and the paper's experiments."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import pathprox
from pathprox.experiments.commands import app as experiments

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=pathprox.__doc__)
app.add_typer(experiments)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pathprox {pathprox.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Weight decay that ends with a smaller network."""


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="package.module:factory, a callable that returns the model, or the model.")
    ],
    shapes: Annotated[
        list[str], typer.Option("--input", help="Shape of an example input, like 1,3,224,224; repeatable.")
    ],
    dtype: Annotated[str, typer.Option(help="Of the inputs: float32, or int64 for token numbers.")] = "float32",
    exclude: Annotated[list[str] | None, typer.Option(help="A layer to leave out; repeatable.")] = None,
    removable: Annotated[
        bool, typer.Option("--removable", help="Also units that can be removed but not rescaled, as before GELU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table for machines.")] = False,
) -> None:
    """Print which units a model has, and for every other layer why not."""
    try:
        model = _load(target)
        inputs = tuple(_example(shape, dtype) for shape in shapes)
        units = pathprox.find_units(model, inputs, exclude=exclude or (), homogeneous_only=not removable)
    except (ValueError, TypeError) as error:
        typer.echo(f"pathprox: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(units.to_dict(), indent=2) if as_json else str(units))


def _load(target: str) -> nn.Module:
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(
            f"{target!r} does not name a model: write package.module:factory, like torchvision.models:resnet18"
        )
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, so that a file in this folder can be named
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {target!r}: {error}") from error
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{target!r} gave {type(model).__name__}, not a torch.nn.Module")
    return model


def _example(shape: str, dtype: str) -> torch.Tensor:
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise ValueError(
            f"--input {shape!r} is not a shape: write whole numbers with commas, like 1,3,224,224"
        ) from None
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"--dtype {dtype!r} is not a torch dtype, like float32 or int64")
    return torch.randn(sizes).to(kind) if kind.is_floating_point else torch.ones(sizes, dtype=kind)
