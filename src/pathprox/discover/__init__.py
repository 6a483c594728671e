"""Finding the homogeneous units of a model: trace, send labels through the graph, prove what comes out.

>>> import torch
>>> from pathprox import find_units
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> units = find_units(model, torch.randn(1, 4))
>>> [(group.name, len(group)) for group in units]
[('0 -> 2', 8)]
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathprox.copies import Inputs, double, inner_name, seeded
from pathprox.discover.graph import follow, trace
from pathprox.discover.groups import choose_couplings, collect, find_chains, layer_rows
from pathprox.discover.proof import Proof
from pathprox.units import LeftOut, UnitGroup, Units

__all__ = ["find_units"]


def find_units(
    model: nn.Module, example_inputs: Any, exclude: Iterable[str] = (), *, homogeneous_only: bool = True
) -> Units:
    """Every group of homogeneous units of ``model``, proved numerically, and for every other layer the reason.

    Args:
        model: any module that `torch.export` can trace. It is not changed. Call this before wrapping it in DDP or
            compiling it.
        example_inputs: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        exclude: names of layers (or of modules that hold them; ``*`` matches) whose weights must not belong to any
            unit.
        homogeneous_only: False also finds units that can be removed but not rescaled, as those before GELU or SiLU.
            They have no path norm: PathProx puts a group lasso on their output weights v, and ordinary weight decay
            on w. That is not weight decay in another form, so it has to be asked for.

    The proof runs on a float64 copy at random weights: memory for a handful of copies of the model in float64, and
    about ten forward passes.
    """
    _refuse_wrapped(model)
    patterns = _patterns(model, exclude)
    with seeded(0, model):
        return _find(model, _inputs(example_inputs), patterns, homogeneous_only)


def _find(model: nn.Module, example: Inputs, patterns: Sequence[str], homogeneous_only: bool) -> Units:
    copied, inputs = double(model, example)
    program = trace(copied, inputs)
    book = follow(program, copied, _shared_memory(model))
    found = collect(book, homogeneous_only)
    groups, excluded = _split(found.groups, lambda g: _excluded(g, patterns))
    bundles, _ = _split(found.bundles, lambda g: _excluded(g, patterns))
    proof = Proof(copied, inputs, _lowest_precision(program))
    failed = proof.run([*groups, *bundles])
    refused = [LeftOut(x, failed[i]) for i, g in enumerate(groups) if i in failed for x in g.layers_in]
    bundles = [g for i, g in enumerate(bundles, len(groups)) if i not in failed]
    groups = [g for i, g in enumerate(groups) if i not in failed]
    couplings = choose_couplings(groups)
    return Units(
        model,
        groups,
        couplings=couplings,
        chains=find_chains(groups, couplings),
        left_out=[*found.left_out, *excluded, *refused],
        notes=proof.notes,
        rows=layer_rows(book),
        inputs=example,
        bundles=bundles,
    )


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_units takes a torch.nn.Module, not {type(model).__name__}")
    inner = inner_name(model)
    if inner is not None:
        raise ValueError(
            f"the model is already wrapped in {type(model).__name__}. Call find_units on the model inside "
            f"(model.{inner}): the parameters are the same, so PathProx fits the wrapped model's optimizer."
        )


def _inputs(example_inputs: Any) -> Inputs:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)), {}


def _shared_memory(model: nn.Module) -> dict[str, str]:
    """Parameters that lie in the same memory as another parameter or buffer, without being the same object."""
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if t.numel() and t.device.type != "meta" and t.layout is torch.strided:
            first = int(t.storage_offset()) * t.element_size()
            last = first + (sum((n - 1) * k for n, k in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()
            spans.setdefault((t.device, t.untyped_storage().data_ptr()), []).append((first, last, name))
    shared: dict[str, str] = {}
    for there in spans.values():
        for (a, b, name), (c, d, other) in itertools.combinations(there, 2):
            if a < d and c < b:
                shared |= {name: other, other: name}
    return shared


def _lowest_precision(program: torch.export.ExportedProgram) -> torch.dtype:
    values = (node.meta.get("val") for node in program.graph.nodes)
    floats = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    return min(floats, key=lambda kind: torch.finfo(kind).bits, default=torch.float64)


def _patterns(model: nn.Module, exclude: Iterable[str]) -> list[str]:
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3)
            hint = f" Did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"exclude={pattern!r} names no module or parameter of the model.{hint}")
    return patterns


def _excluded(group: UnitGroup, patterns: Sequence[str]) -> LeftOut | None:
    for pattern in patterns:
        for s in group.into + group.bias + group.out:
            parts = s.name.split(".")
            if any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1)):
                return LeftOut(", ".join(group.layers_in), f"excluded by exclude={pattern!r}")
    return None


def _split(groups: Sequence[UnitGroup], test: Any) -> tuple[list[UnitGroup], list[LeftOut]]:
    verdicts = [(g, test(g)) for g in groups]
    return [g for g, out in verdicts if out is None], [out for _, out in verdicts if out is not None]
