"""Removing dead units: the same function, fewer units, a plain module of the same classes.

A unit is dead when its output weights are all exactly zero (nothing hears it) or its input weights and biases are (it
says nothing). Its entries are cut out of every parameter and buffer that has a slice of it. Cutting a row of one layer
can leave a unit of the layer before without listeners, so this goes on until nothing more dies.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathprox.slices import Slice
from pathprox.units import UnitGroup, Units

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference of the outputs, relative to the largest output, that still counts as the same function."""


@torch.no_grad()
def shrink(model: nn.Module, units: Units) -> nn.Module:
    """A copy of ``model`` without its dead units. The original is untouched.

    The copy is compared with the original on the example inputs that the units were found with. Groups that the model
    cannot do without at the old size (a literal number in a ``view``, say) keep their dead units, and a warning names
    them with the line.
    """
    if model is not units.model:
        raise ValueError("these units were found in another model. Call find_units on the model that is to be shrunk.")
    refused: dict[int, str] = {}
    while True:
        small, stuck, problem = _attempt(units, [i for i in range(len(units)) if i not in refused])
        if problem is None:
            break
        refused |= _culprits(units, [i for i in range(len(units)) if i not in refused], problem)
    refused |= dict.fromkeys(
        stuck, "they are not whole groups of a grouped convolution, or not whole rows of a parameter"
    )
    for i, reason in refused.items():
        warnings.warn(f"dead units of {units[i].name} were kept: {reason}", stacklevel=2)
    return small


def _attempt(units: Units, allowed: Sequence[int]) -> tuple[nn.Module, set[int], str | None]:
    """The model without the dead units of the allowed groups, the groups that were left, and what is wrong with it."""
    small = copy.deepcopy(units.model)
    stuck = _cut(small, units, allowed)
    return small, stuck, _problem(units, small)


def _culprits(units: Units, allowed: Sequence[int], problem: str) -> dict[int, str]:
    """Which of these groups cannot be shrunk, each tried by itself; all of them where only together they fail."""
    alone = {i: reason for i in allowed if (reason := _attempt(units, [i])[2]) is not None}
    return alone or dict.fromkeys(allowed, problem)


def _problem(units: Units, small: nn.Module) -> str | None:
    try:
        before, after = units.outputs(units.model), units.outputs(small)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
        return f"at the smaller size the model fails ({frames[-1].filename}:{frames[-1].lineno}): {error}"
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return f"an output of shape {tuple(a.shape)} became {tuple(b.shape)}"
        limit = TOLERANCE.get(a.dtype, 1e-2) * float(a.abs().max()) if a.is_floating_point() and a.numel() else 0.0
        if a.numel() and not float((a - b).abs().max()) <= limit:
            return f"the outputs changed by {float((a - b).abs().max()):.1e}"
    return None


def _cut(small: nn.Module, units: Units, allowed: Sequence[int]) -> set[int]:
    """Cut the dead units of the allowed groups out of ``small``, a copy of the model; returns groups that cannot be."""
    tensors = dict(small.named_parameters()) | dict(small.named_buffers())
    stuck: set[int] = set()
    while True:
        which = [i for i in allowed if i not in stuck]
        dead = find_dead([units[i] for i in which], tensors)
        cuts, conflicts = _plan(which, [units[i] for i in which], dead)
        if not conflicts:
            break
        stuck |= conflicts
    for name, keep in cuts.items():
        _replace(small, name, keep)
    for module in small.modules():
        _refresh(module)
    return stuck


@torch.no_grad()
def find_dead(groups: Sequence[UnitGroup], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Which units of each group are dead, those included that die with others. One unit of a dead layer is spared."""
    scratch = {s.name: tensors[s.name].detach().clone() for g in groups for s in g.into + g.bias + g.out}
    dead = [torch.zeros(len(g), dtype=torch.bool) for g in groups]
    found = True
    while found:
        found = False
        for i, group in enumerate(groups):
            unheard = _zero(group.out, scratch)
            silent = _zero(group.into + group.bias, scratch)
            now = unheard | silent
            if (now & ~dead[i]).any():
                found, dead[i] = True, dead[i] | now
                for s in group.into + group.bias + group.out:
                    s.scale_(scratch[s.name], torch.where(dead[i], 0.0, 1.0).to(scratch[s.name]))
    for mask in dead:
        if mask.all():
            mask[0] = False
    return dead


def _zero(slices: Sequence[Slice], tensors: dict[str, Tensor]) -> Tensor:
    """Units all of whose entries are exactly zero."""
    return torch.stack([s.total((s.view(tensors[s.name]) != 0).double()) == 0 for s in slices]).all(0).cpu()


@dataclass
class _Cut:
    """The view in which a parameter is cut, and for some of its dimensions what is kept."""

    shape: tuple[int, ...]
    keep: dict[int, Tensor]
    by: dict[int, int]
    """The group that decided about each dimension."""


def _plan(
    numbers: Sequence[int], groups: Sequence[UnitGroup], dead: Sequence[Tensor]
) -> tuple[dict[str, _Cut], set[int]]:
    """What to keep of each parameter; and the groups whose dead units do not form whole slabs of it."""
    cuts: dict[str, _Cut] = {}
    conflicts: set[int] = set()
    for number, group, mask in zip(numbers, groups, dead, strict=True):
        for s in group.slices if mask.any() else ():
            kept = ~torch.cat([mask, torch.zeros(1, dtype=torch.bool)])[s.owner].view([s.shape[d] for d in s.dims])
            cut = cuts.setdefault(s.name, _Cut(s.shape, {}, {}))
            slabs = [kept.any(tuple(e for e in range(kept.dim()) if e != d)) for d in range(kept.dim())]
            if cut.shape != s.shape or not torch.equal(_outer(slabs), kept):
                conflicts.add(number)
                continue
            for d, slab in zip(s.dims, slabs, strict=True):
                if d in cut.keep and not torch.equal(cut.keep[d], slab) and len(s.dims) > 1:
                    conflicts |= {number, cut.by[d]}
                cut.keep[d] = slab & cut.keep.get(d, slab)
                cut.by[d] = number
    return cuts, conflicts


def _outer(slabs: Sequence[Tensor]) -> Tensor:
    product = slabs[0]
    for slab in slabs[1:]:
        product = product.unsqueeze(-1) & slab
    return product


def _replace(model: nn.Module, name: str, cut: _Cut) -> None:
    """Put the kept part in the parameter's or buffer's place."""
    layer, _, leaf = name.rpartition(".")
    module = model.get_submodule(layer)
    old: Tensor = getattr(module, leaf)
    view = old.detach().view(cut.shape)
    for d, slab in cut.keep.items():
        view = view.index_select(d, slab.nonzero().flatten().to(view.device))
    if old.dim() == 1:
        new = view.flatten()
    elif len(cut.shape) > old.dim() and cut.shape[0] > 1:  # a grouped convolution
        new = view.flatten(0, 1)
        setattr(module, "groups", len(view))  # noqa: B010  (mypy knows no groups of a Module)
    else:
        new = view.reshape(view.shape[len(cut.shape) - old.dim() :])
    if isinstance(old, nn.Parameter):
        setattr(module, leaf, nn.Parameter(new.contiguous(), requires_grad=old.requires_grad))
    else:
        module._buffers[leaf] = new.contiguous()


def _refresh(module: nn.Module) -> None:
    """Let the attributes of a layer say its new size."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[0], module.weight.shape[1] * module.groups
        module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)
    elif isinstance(module, nn.modules.batchnorm._NormBase) and isinstance(module.weight, Tensor):
        module.num_features = len(module.weight)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
