"""Removing dead units: the same function, fewer units, a plain module of the same classes.

A unit is dead when its output weights are all exactly zero (nothing hears it) or its input weights and biases are (it
says nothing). Its entries are cut out of every parameter and buffer that has a slice of it. Cutting a row of one layer
can leave a unit of the layer before without listeners, so this goes on until nothing more dies.

Nothing is believed: every removal is tried on copies first, at the model's weights and at random ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathprox.constants import fold_constants_
from pathprox.copies import copy_of, fit
from pathprox.dead import find_dead, silence_
from pathprox.removal import Removal, Search
from pathprox.slices import Slice
from pathprox.stepsize import unwrapped
from pathprox.surgery import Cut, cut_group, cut_slice
from pathprox.trial import difference
from pathprox.units import UnitGroup, Units


@torch.no_grad()
def shrink(model: nn.Module, units: Units, *, multiple_of: int = 1) -> nn.Module:
    """A copy of ``model`` without its dead units. The original is untouched.

    Units that are only a constant (w = 0, the bias is not) go into the biases of the next layer, where that is exact.
    Groups that the model cannot do without at the old size (a literal number in a ``view``, say) keep their dead
    units, and a warning names them with the line.

    Args:
        model: the model that the units were found in.
        units: from `find_units`.
        multiple_of: keep as many dead units of each group as make it a multiple. Tensor cores want channels in
            multiples of 8 and can be slower with 509 of them than with 512.
    """
    _refuse_strangers(model, units)
    small = copy_of(model)
    _fold_all_(small, units)
    if difference(model, small, units):  # rounding, at worst: then without folding
        small = copy_of(model)
    removal = Search(small, units, multiple_of=multiple_of).run()
    removal.warn(stacklevel=3)
    removal.apply(small)
    return small


@torch.no_grad()
def shrink_(
    model: nn.Module,
    units: Units,
    optimizer: Optimizer | None = None,
    *,
    settled: Sequence[Tensor] | None = None,
    multiple_of: int = 1,
) -> int:
    """Remove dead units from the model itself, in the middle of training. Returns how many were removed.

    Parameters stay the same objects, so optimizer, parameter groups, schedulers and attached regularisers go on;
    momentum and second moments are cut with them, and ``units`` describes the smaller model afterwards. If something
    cannot be done, nothing is changed. A model wrapped in DDP has to be wrapped again; a compiled one compiles again.

    Args:
        model: the model that the units were found in.
        units: from `find_units`.
        optimizer: the one that trains the model; give it if it has taken a step.
        settled: for each group the units to remove (with what dies with them); by default all that are dead now.
        multiple_of: as for `shrink`.
    """
    _refuse_strangers(model, units)
    optimizer = None if optimizer is None else unwrapped(optimizer)
    removal = Search(model, units, settled, multiple_of).run()
    removal.warn(stacklevel=3)
    count = sum(int(removal.covered(i).sum()) for i in range(len(units)))
    if removal.cuts:
        state = _smaller_state(model, removal.cuts, optimizer)
        smaller = _smaller_units(units, removal)
        removal.apply(model)
        for entry, name, tensor in state:
            entry[name] = tensor
        units.become(*smaller)
    return count


def _fold_all_(small: nn.Module, units: Units) -> None:
    """Silence dead units altogether, fold constants, and again: the one can make more of the other."""
    tensors = dict(small.named_parameters())
    folded = 1
    while folded:
        for group, mask in zip(units.groups, find_dead(units.groups, tensors), strict=True):
            silence_(group, mask, tensors)
        folded = fold_constants_(small, units.groups, fit(units.inputs, small)) if units.inputs else 0


def _refuse_strangers(model: nn.Module, units: Units) -> None:
    if model is not units.model:
        raise ValueError("these units were found in another model. Call find_units on the model that is to be shrunk.")


def _smaller_state(
    model: nn.Module, cuts: dict[str, Cut], optimizer: Optimizer | None
) -> list[tuple[dict[str, object], str, Tensor]]:
    """What the optimizer remembers of the parameters that are cut, cut in the same way."""
    found = []
    for name, parameter in model.named_parameters():
        entry = optimizer.state.get(parameter, {}) if optimizer is not None and name in cuts else {}
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                found.append((entry, key, cuts[name](value)))
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name} in the shape {tuple(value.shape)}, not in "
                    "that of the parameter, so it cannot be shrunk with it. Shrink the model after training instead."
                )
    return found


def _smaller_units(
    units: Units, removal: Removal
) -> tuple[list[UnitGroup], list[UnitGroup], list[Tensor], list[Slice]]:
    """Groups, bundles, the units that are kept of each group, and rows, as they are in the smaller model."""
    count = len(units.groups)
    kept = [~removal.covered(i) for i in range(len(removal.groups))]
    smaller = [cut_group(g, removal.cuts, mask) for g, mask in zip(removal.groups, kept, strict=True)]
    rows = [cut_slice(s, removal.cuts.get(s.name), torch.ones(s.units, dtype=torch.bool)) for s in units.rows()]
    return smaller[:count], smaller[count:], kept[:count], rows
