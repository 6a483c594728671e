"""The fused step on a GPU: four kernels for all weights, however many layers there are.

`_measure` sums squares in tiles, `_combine` adds a unit's sums in a fixed order (no atomics, so that replicas stay
equal bit for bit), `_decide` turns norms into factors, and `_scale` multiplies. Addresses and sizes are in tables on
the device, made once; nothing waits for the host, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pathprox.layout import Layout, Piece

ROWS, COLUMNS = 64, 128
"""The size of a tile."""
WIDEST = 128
"""The most couplings that `_decide`, a single program, can relate to each other."""
BY_ROW, BY_COLUMN, WHOLE = 0, 1, 2
"""What a factor belongs to: a row, a column (of a batch of rows), or all of a tensor."""


@triton.jit
def _tile(pieces, tiles, tile, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's addresses, which of them are in the tensor, and where the slots of its rows or columns are."""
    piece = pieces + 4 * tl.load(tiles + 5 * tile)
    rows = tl.load(tiles + 5 * tile + 1) + tl.arange(0, ROWS)
    columns = tl.load(tiles + 5 * tile + 3) + tl.arange(0, COLUMNS)
    width = tl.load(piece + 1)
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    row_inside, column_inside = rows < tl.load(tiles + 5 * tile + 2), columns < width
    inside = row_inside[:, None] & column_inside[None, :] & (offsets < tl.load(piece + 2))
    pointers = tl.load(piece).to(tl.pointer_type(dtype)) + offsets
    first = tl.load(tiles + 5 * tile + 4)
    return pointers, inside, first + rows, row_inside, first + columns, column_inside, first, tl.load(piece + 3)


@triton.jit
def _measure(pieces, tiles, partial, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of squares of a tile's rows or columns, in float64."""
    tile = tl.program_id(0)
    pointers, inside, _, _, _, _, _, kind = _tile(pieces, tiles, tile, dtype, ROWS, COLUMNS)
    x = tl.load(pointers, mask=inside, other=0).to(tl.float64)
    out = partial + tile.to(tl.int64) * COLUMNS
    if kind == 0:
        tl.store(out + tl.arange(0, ROWS), tl.sum(x * x, axis=1))
    else:
        tl.store(out + tl.arange(0, COLUMNS), tl.sum(x * x, axis=0))


@triton.jit
def _combine(partial, members, starts, norms, BLOCK: tl.constexpr):
    """The norm of one unit's w or v, from the sums of the tiles it lies in."""
    slot = tl.program_id(0)
    end = tl.load(starts + slot + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    at = tl.load(starts + slot)
    while at < end:
        here = at + tl.arange(0, BLOCK)
        member = tl.load(members + here, mask=here < end, other=0)
        total += tl.load(partial + member, mask=here < end, other=0)
        at += BLOCK
    tl.store(norms + slot, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _decide(
    norms,
    gauge,
    decay,
    of_coupling,
    of_other,
    links,
    powers,
    ok,
    skipped,
    v_norm,
    factors,
    couplings,
    most,
    others,
    limit,
    HAS_OK: tl.constexpr,
    POWERS: tl.constexpr,
    COUPLINGS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """All factors, from all norms: Algorithm 1 but for the multiplications."""
    k = tl.arange(0, COUPLINGS)
    real = k < couplings
    threshold = tl.load(decay + tl.load(of_coupling + k, mask=real, other=0), mask=real, other=0)
    total = tl.zeros((COUPLINGS,), tl.float64)
    everything = tl.zeros((COUPLINGS,), tl.float64)
    start = 0
    while start < most:
        unit = start + tl.arange(0, UNITS)
        at = k[:, None] * most + unit[None, :]
        there = real[:, None] & (unit < most)[None, :]
        w = tl.load(norms + at, mask=there, other=0)
        v = tl.load(norms + couplings * most + at, mask=there, other=0)
        g = tl.load(gauge + at, mask=there, other=1)
        least = threshold[:, None] * g
        total += tl.sum(tl.where(v > least, g * (v - least), 0.0), axis=1)
        everything += tl.sum(w + v, axis=1)
        start += UNITS
    whole = tl.sum(everything, axis=0)
    finite = tl.abs(whole) < float("inf")
    good = finite
    if HAS_OK:
        good = finite & (tl.load(ok) != 0)
        tl.store(skipped, tl.load(skipped) + ((tl.load(ok) != 0) & (finite == 0)).to(tl.float32))
    else:
        tl.store(skipped, tl.load(skipped) + (finite == 0).to(tl.float32))

    # The balance of each chain, in logarithms. links[k, j]: 0 another chain, 1 the same, 2 the same and j not after k.
    link = tl.load(links + k[:, None] * COUPLINGS + k[None, :])
    log = tl.log(total)
    mean = tl.sum(tl.where(link > 0, log[None, :], 0.0), axis=1) / tl.sum((link > 0).to(tl.float64), axis=1)
    step = mean - log
    sound = tl.abs(step) <= limit
    unsound = tl.sum(tl.where((link > 0) & (sound[None, :] == 0), 1, 0), axis=1)
    step = tl.where(unsound == 0, step, 0.0)
    step = tl.where(good, step, 0.0)
    behind = tl.sum(tl.where(link == 2, step[None, :], 0.0), axis=1)
    layer = tl.exp(step)

    start = 0
    while start < most:
        unit = start + tl.arange(0, UNITS)
        at = k[:, None] * most + unit[None, :]
        there = real[:, None] & (unit < most)[None, :]
        w = tl.load(norms + at, mask=there, other=0)
        v = tl.load(norms + couplings * most + at, mask=there, other=0)
        g = tl.load(gauge + at, mask=there, other=1)
        least = threshold[:, None] * g
        alive = v > least
        shrink = tl.where(alive, 1 - least / tl.where(alive, v, 1.0), 0.0)
        project = tl.where(w > 0, g / tl.where(w > 0, w, 1.0), 1.0)
        tl.store(factors + at, tl.where(good, project, 1.0), mask=there)
        tl.store(factors + couplings * most + at, tl.where(good, shrink * layer[:, None], 1.0), mask=there)
        tl.store(v_norm + at, v * shrink, mask=there)
        start += UNITS
    factors += 2 * couplings * most
    start = 0
    while start < others:
        other = start + tl.arange(0, UNITS)
        step_decay = tl.load(decay + tl.load(of_other + other, mask=other < others, other=0))
        tl.store(factors + other, tl.where(good, 1 / (1 + step_decay), 1.0), mask=other < others)
        start += UNITS
    factors += others
    tl.store(factors + k, tl.exp(behind), mask=real)
    for p in tl.static_range(POWERS):
        factors += couplings
        power = tl.load(powers + p)
        tl.store(factors + k, tl.exp(power * step), mask=real)
        factors += couplings
        tl.store(factors + k, tl.exp(power * behind), mask=real)


@triton.jit
def _scale(pieces, tiles, slots, factors, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply a tile by the factors of its rows or columns."""
    pointers, inside, rows, row_inside, columns, column_inside, first, kind = _tile(
        pieces, tiles, tl.program_id(0), dtype, ROWS, COLUMNS
    )
    x = tl.load(pointers, mask=inside, other=0)
    if kind == 0:
        factor = tl.load(factors + tl.load(slots + rows, mask=row_inside, other=0))
        x = x * factor.to(dtype)[:, None]
    elif kind == 1:
        factor = tl.load(factors + tl.load(slots + columns, mask=column_inside, other=0))
        x = x * factor.to(dtype)[None, :]
    else:
        x = x * tl.load(factors + tl.load(slots + first)).to(dtype)
    tl.store(pointers, x, mask=inside)


class Tables:
    """The addresses of tensors, cut into tiles, and what the kernels need to know of each."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> None:
        self.layout = layout
        self.pointers = [x.data_ptr() for x in tensors]
        device = tensors[0].device
        self.dtype = {torch.float32: tl.float32, torch.float64: tl.float64}[tensors[0].dtype]
        cut = [_cut(p, whole=i >= layout.measured and len(p.slots) == 1) for i, p in enumerate(pieces)]
        starts = accumulate((len(p.slots) for p in pieces), initial=0)
        tiles = torch.cat([_numbered(x, i, start) for i, ((_, x), start) in enumerate(zip(cut, starts, strict=False))])
        head = torch.tensor([[x.data_ptr(), *row] for x, (row, _) in zip(tensors, cut, strict=True)])
        slots = torch.cat([p.slots for p in pieces])
        self.measured = sum(len(tiles) for _, tiles in cut[: layout.measured])
        self.count = len(tiles)
        members, ends = _members(tiles[: self.measured], head, slots, layout.slots.other)
        self.pieces = head.to(device)
        self.tiles, self.slots, self.members, self.ends = (x.int().to(device) for x in (tiles, slots, members, ends))
        self.couplings = max(4, triton.next_power_of_2(layout.slots.couplings))
        self.links = 2 * torch.eye(self.couplings, dtype=torch.int8)
        self.links[: layout.slots.couplings, : layout.slots.couplings] = layout.links
        self.links = self.links.to(device)
        wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.powers = torch.tensor(layout.slots.powers or (0,), **wide)
        self.partial = torch.zeros(self.measured * COLUMNS, **wide)
        self.norms = torch.zeros(layout.slots.other, **wide)
        self.factors = torch.ones(layout.slots.one + 1, **wide)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        return [x.data_ptr() for x in tensors] == self.pointers

    def measure(self) -> None:
        _measure[(self.measured,)](self.pieces, self.tiles, self.partial, self.dtype, ROWS, COLUMNS, num_warps=8)
        _combine[(len(self.norms),)](self.partial, self.members, self.ends, self.norms, 64, num_warps=1)

    def multiply_(
        self,
        tensors: Sequence[Tensor],
        gauge: Tensor,
        decay: Tensor,
        groups: tuple[Tensor, Tensor],
        limit: float,
        ok: Tensor | None,
        skipped: Tensor,
        v_norm: Tensor,
    ) -> None:
        slots = self.layout.slots
        _decide[(1,)](
            self.norms,
            gauge,
            decay,
            *groups,
            self.links,
            self.powers,
            skipped if ok is None else ok,
            skipped,
            v_norm,
            self.factors,
            slots.couplings,
            slots.most,
            slots.others,
            math.log(limit),
            HAS_OK=ok is not None,
            POWERS=len(slots.powers),
            COUPLINGS=self.couplings,
            UNITS=max(16, 4096 // self.couplings),
            num_warps=8,
        )
        _scale[(self.count,)](self.pieces, self.tiles, self.slots, self.factors, self.dtype, ROWS, COLUMNS, num_warps=8)
        torch.autograd.graph.increment_version(tensors)  # which kernels do not do by themselves


def _cut(piece: Piece, whole: bool) -> tuple[list[int], Tensor]:
    """(columns, numbers in all, kind), and for each tile its first row, the end of its rows, first column, batch."""
    batches, rows, columns = piece.shape
    count, kind, high = batches * rows * columns, BY_COLUMN, rows
    if whole:
        columns, kind = COLUMNS, WHOLE
        high = triton.cdiv(count, columns)
    elif piece.by_row:
        kind, batches, high = BY_ROW, 1, batches
    batch, row, column = torch.meshgrid(
        torch.arange(batches), torch.arange(0, high, ROWS), torch.arange(0, columns, COLUMNS), indexing="ij"
    )
    tiles = torch.stack([batch * high + row, (batch + 1) * high, column, batch * columns], -1)
    return [columns, count, kind], tiles.flatten(0, 2)


def _numbered(tiles: Tensor, piece: int, start: int) -> Tensor:
    """Tiles with the number of their piece, and their first position among those of all pieces."""
    return torch.cat([torch.full((len(tiles), 1), piece), tiles[:, :3], tiles[:, 3:] + start], 1)


def _members(tiles: Tensor, pieces: Tensor, slots: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """For each unit the sums that `_measure` gives it, one unit after the other, and where each unit's begin."""
    piece, row, row_end, column, first = tiles.unbind(1)
    by_row = pieces[piece, 3] == BY_ROW
    start = torch.where(by_row, row, column)
    end = torch.where(by_row, torch.minimum(row_end, row + ROWS), torch.minimum(pieces[piece, 1], column + COLUMNS))
    place = start[:, None] + torch.arange(COLUMNS)
    there = place < end[:, None]
    slot = torch.where(there, slots[torch.where(there, first[:, None] + place, 0)], units).flatten()
    counts = torch.bincount(slot.clamp_max(units), minlength=units + 1)[:units]
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return torch.argsort(slot, stable=True)[: int(ends[-1])], ends
