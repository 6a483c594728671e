"""Which units are dead: exact zeros, and whatever dies with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pathprox.slices import Slice
from pathprox.units import UnitGroup


@torch.no_grad()
def find_dead(
    groups: Sequence[UnitGroup], tensors: Mapping[str, Tensor], given: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Which units of each group are dead, those included that die with others. One unit of a dead layer is spared.

    A unit is dead when its output weights are all exactly zero (nothing hears it) or, if it is homogeneous, its input
    weights and biases are (it says nothing). With ``given``, only those units are, and what dies with them.
    """
    names = {s.name for g in groups for s in g.into + g.bias + g.out}
    there = {name: tensors[name] != 0 if given is None else torch.ones_like(tensors[name]).bool() for name in names}
    dead = [torch.zeros(len(g), dtype=torch.bool) for g in groups]
    found = True
    while found:
        found = False
        for i, group in enumerate(groups):
            now = gone(group.out, there)
            if group.homogeneous:
                now |= gone(group.into + group.bias, there)
            if given is not None:
                now |= given[i].cpu()
            if (now & ~dead[i]).any():
                found, dead[i] = True, dead[i] | now
                for s in (s for s in group.slices if s.name in there):
                    alive = (~dead[i]).to(there[s.name].device)
                    s.view(there[s.name]).logical_and_(s.expand(alive, fill=1))
    for mask in dead:
        if mask.all():
            mask[0] = False
    return dead


def silence_(group: UnitGroup, dead: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Set all weights and biases of dead units to zero."""
    for s in group.into + group.bias + group.out if dead.any() else ():
        weight = tensors[s.name].detach()
        s.scale_(weight, torch.where(dead, 0.0, 1.0))


def gone(slices: Sequence[Slice], there: dict[str, Tensor]) -> Tensor:
    """Units that have no entry left in these slices."""
    return ~torch.stack([s.any(s.view(there[s.name])).cpu() for s in slices]).any(0)


def spare_half_blocks_(groups: Sequence[UnitGroup], dead: Sequence[Tensor]) -> None:
    """A group of a grouped convolution goes as a whole: all of its inputs with all of its outputs, or neither."""
    sides: dict[str, dict[tuple[int, ...], list[tuple[int, Slice]]]] = {}
    for i, group in enumerate(groups):
        for s in (s for s in group.slices if len(s.dims) > 1 and s.dims[0] == 0 and len(s.dims) < len(s.shape)):
            sides.setdefault(s.name, {}).setdefault(s.dims, []).append((i, s))
    changed = True
    while changed:
        changed = False
        for views in sides.values():
            gone = {dims: torch.stack([_blocks(s, dead[i]) for i, s in them]).any(0) for dims, them in views.items()}
            empty = {dims: mask.all(1) for dims, mask in gone.items()}
            whole = torch.stack(list(empty.values())).all(0) if len(empty) > 1 else torch.zeros_like(*empty.values())
            for dims, them in views.items():
                half = (empty[dims] & ~whole)[:, None].expand(gone[dims].shape).flatten()
                for i, s in them:
                    spared = s.owner[half & (s.owner >= 0)]
                    if dead[i][spared].any():
                        dead[i][spared], changed = False, True


def _blocks(s: Slice, dead: Tensor) -> Tensor:
    """Which positions of each block belong to dead units."""
    return torch.cat([dead, torch.zeros(1, dtype=torch.bool)])[s.owner].view(s.shape[0], -1)


def checked_multiple(multiple_of: int) -> int:
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be a whole number, 1 or more, got {multiple_of}")
    return multiple_of


def keep_multiple(dead: Tensor, multiple_of: int) -> Tensor:
    """As many of the dead units, but so that a multiple is left; the others are spared."""
    result = dead.clone()
    result[dead.nonzero().flatten()[: _spared(int((~dead).sum()), multiple_of)]] = False
    return result


def _spared(left: int, multiple_of: int) -> int:
    """How many more have to be left to be a multiple."""
    return -left % multiple_of


def even(dead: Tensor, parts: Tensor, multiple_of: int = 1) -> Tensor:
    """As many dead units in every part, but for parts that are dead altogether; the others are spared.

    Of each part a multiple is left.
    """
    size = torch.bincount(parts)
    count = torch.bincount(parts, dead.double(), minlength=len(size)).long()
    whole = count == size
    least = int(count[~whole].min()) if (~whole).any() else 0
    least = max(0, least - max([_spared(n - least, multiple_of) for n in size[~whole].tolist()], default=0))
    result = dead.clone()
    for part in (~whole).nonzero().flatten().tolist():
        result[(dead & (parts == part)).nonzero().flatten()[least:]] = False
    return result


def parts_of(group: UnitGroup, bundles: Sequence[UnitGroup]) -> Tensor | None:
    """The part of the group that each unit belongs to, where a reshape or a grouped convolution tells parts apart."""
    for bundle in bundles:
        for mine in group.into:
            theirs = next((s for s in bundle.into if s.name == mine.name and s.dims == mine.dims), None)
            if theirs is not None:
                return _numbers(mine, theirs.owner)
    for s in group.out + group.into:
        if len(s.dims) > 1:
            sizes = [s.shape[d] for d in s.dims]
            return _numbers(s, torch.arange(sizes[0]).repeat_interleave(torch.Size(sizes[1:]).numel()))
    return None


def _numbers(s: Slice, positions: Tensor) -> Tensor | None:
    """For each unit the number that its positions have; None if some unit has several."""
    found = torch.full((s.units,), -1)
    mine = s.owner >= 0
    found[s.owner[mine]] = positions[mine]
    same = bool((found[s.owner[mine]] == positions[mine]).all())
    return found if same and bool((found >= 0).all()) else None
