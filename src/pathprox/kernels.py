"""The fused step on a GPU: four kernels for all weights, however many layers there are.

`_measure` sums squares in tiles, `_combine` adds a unit's sums in a fixed order (no atomics, so that replicas stay
equal bit for bit) and turns its norms into factors, `_decide` balances the layers and says whether the step counts, and
`_apply` multiplies. With fused SGD the weights that are measured are those that the optimizer's step would lead to, and
`_apply` takes that step: nothing is written before all is known to be finite. Sizes are in tables on the device, made
once; addresses and rates are sent again when they change. Nothing waits for the host, so a step can be captured in a
CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pathprox import tiles
from pathprox.tiles import Tables

WARPS = 4
HIGH, WIDE = tl.constexpr(tiles.ROWS), tl.constexpr(tiles.COLUMNS)
FIELDS, KIND, GROUP = (tl.constexpr(x) for x in (tiles.FIELDS, tiles.KIND, tiles.GROUP))
BY_ROW, BY_COLUMN = tl.constexpr(tiles.BY_ROW), tl.constexpr(tiles.BY_COLUMN)
SGD, SGD_MOMENTUM = tl.constexpr(1), tl.constexpr(2)
"""Whose step the kernels take as well; 0: nobody's."""
WIDEST = 128
"""The most couplings that `_decide`, a single program, can relate to each other."""


@triton.jit
def _find(tiles, addresses, rates):
    """This program's tile in the table, where its tensors begin, and the rates of its parameter group."""
    tile = tiles + FIELDS * tl.program_id(0)
    return tile, addresses + 4 * tl.load(tile), rates + 8 * tl.load(tile + GROUP)


@triton.jit
def _place(tile, top, HEIGHT: tl.constexpr, ALIGNED: tl.constexpr):
    """Some rows of a tile: offsets in its tensor, which of them are in it, rows and columns, and which of those are."""
    rows = tl.load(tile + 1) + top + tl.arange(0, HEIGHT)
    left, width, count = tl.load(tile + 3), tl.load(tile + 5), tl.load(tile + 6)
    if ALIGNED:
        left, width, count = tl.multiple_of(left, 16), tl.multiple_of(width, 4), tl.multiple_of(count, 4)
    columns = left + tl.arange(0, WIDE)
    offsets = rows[:, None] * width + columns[None, :]
    row_inside, column_inside = rows < tl.load(tile + 2), columns < width
    inside = row_inside[:, None] & column_inside[None, :] & (offsets < count)
    return offsets, inside, rows, row_inside, columns, column_inside


@triton.jit
def _begin(at, which: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the weights (0), their gradients (1) or their momentum (2) are."""
    begin = tl.load(at + which).to(tl.pointer_type(dtype))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin


@triton.jit
def _moved(at, rate, offsets, inside, dtype: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr):
    """The weights, and their momentum, after the step of SGD, if there is one to take."""
    p = tl.load(_begin(at, 0, dtype, ALIGNED) + offsets, mask=inside, other=0)
    m = p
    if STEP >= SGD:
        g = tl.load(_begin(at, 1, dtype, ALIGNED) + offsets, mask=inside, other=0)
        g = tl.load(rate + 5).to(dtype) * g + tl.load(rate + 4).to(dtype) * p
        if STEP == SGD_MOMENTUM:
            m = tl.load(_begin(at, 2, dtype, ALIGNED) + offsets, mask=inside, other=0)
            m = tl.load(rate + 2).to(dtype) * m + tl.load(rate + 3).to(dtype) * g
            g = tl.load(rate + 6).to(dtype) * g + tl.load(rate + 7).to(dtype) * m
        p -= tl.load(rate + 1).to(dtype) * g
    return p, m


@triton.jit
def _measure_tile(
    tile, at, rate, partial, bad, measured, dtype: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr
):
    number = tl.program_id(0)
    offsets, inside, _a, _b, _c, _d = _place(tile, 0, HIGH, ALIGNED)
    if number < measured:
        x, _m = _moved(at, rate, offsets, inside, dtype, STEP, ALIGNED)
        if tl.load(tile + KIND) == BY_ROW:
            tl.store(partial + number * WIDE + tl.arange(0, HIGH), tl.sum(x * x, axis=1))
        else:
            tl.store(partial + number * WIDE + tl.arange(0, WIDE), tl.sum(x * x, axis=0))
    else:
        g = tl.load(_begin(at, 1, dtype, ALIGNED) + offsets, mask=inside, other=0)
        wrong = tl.where(tl.abs(g) < float("inf"), 0, 1)
        tl.store(bad + number - measured, tl.sum(tl.sum(wrong, axis=1), axis=0))


@triton.jit
def _measure(tiles, addresses, rates, partial, bad, measured, dtype: tl.constexpr, STEP: tl.constexpr):
    """The sums of squares of a tile's rows or columns, in the weights' own type: few numbers, added as a tree. What
    tiles give to a unit is added in float64. For weights that are not measured, how many gradients are not finite."""
    tile, at, rate = _find(tiles, addresses, rates)
    if tl.load(at + 3) != 0:
        _measure_tile(tile, at, rate, partial, bad, measured, dtype, STEP, True)
    else:
        _measure_tile(tile, at, rate, partial, bad, measured, dtype, STEP, False)


@triton.jit
def _norm(partial, members, starts, slot, there, UNITS: tl.constexpr, SUMS: tl.constexpr):
    """The norms at these slots, from the sums of the tiles they lie in."""
    at = tl.load(starts + slot, mask=there, other=0)
    end = tl.load(starts + slot + 1, mask=there, other=0)
    total = tl.zeros((UNITS,), tl.float64)
    longest = tl.max(end - at, axis=0)
    done = 0
    while done < longest:
        here = at[:, None] + done + tl.arange(0, SUMS)[None, :]
        inside = here < end[:, None]
        member = tl.load(members + here, mask=inside, other=0)
        total += tl.sum(tl.load(partial + member, mask=inside, other=0).to(tl.float64), axis=1)
        done += SUMS
    return tl.sqrt(total)


@triton.jit
def _combine(
    partial,
    members,
    starts,
    blocks,
    gauge,
    rates,
    of_coupling,
    v_norm,
    factors,
    totals,
    sums,
    couplings,
    most,
    UNITS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Some units of one coupling: the factors that project w and threshold v, their path norms, and a sum that is not
    finite where a norm is not."""
    block = tl.program_id(0)
    k, first = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1)
    unit = first + tl.arange(0, UNITS)
    there = unit < tl.load(blocks + 3 * block + 2)
    at = k * most + unit
    w = _norm(partial, members, starts, at, there, UNITS, SUMS)
    v = _norm(partial, members, starts, couplings * most + at, there, UNITS, SUMS)
    g = tl.load(gauge + at, mask=there, other=1)
    least = tl.load(rates + 8 * tl.load(of_coupling + k)) * g
    alive = v > least
    shrink = tl.where(alive, 1 - least / tl.where(alive, v, 1.0), 0.0)
    project = tl.where(w > 0, g / tl.where(w > 0, w, 1.0), 1.0)
    tl.store(factors + at, project, mask=there)
    tl.store(factors + couplings * most + at, shrink, mask=there)
    tl.store(v_norm + at, v * shrink, mask=there)
    tl.store(totals + block, tl.sum(tl.where(alive, g * (v - least), 0.0), axis=0))
    tl.store(sums + block, tl.sum(tl.where(there, w + v, 0.0), axis=0))


@triton.jit
def _decide(
    totals,
    sums,
    bad,
    first_block,
    rates,
    of_other,
    links,
    powers,
    ok,
    skipped,
    good,
    factors,
    couplings,
    others,
    behind_start,
    layer_start,
    unmeasured,
    limit,
    HAS_OK: tl.constexpr,
    POWERS: tl.constexpr,
    COUPLINGS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Whether the step counts, and the factors that belong to layers."""
    k = tl.arange(0, COUPLINGS)
    real = k < couplings
    at = tl.load(first_block + k, mask=real, other=0)
    end = tl.load(first_block + k + 1, mask=real, other=0)
    total = tl.zeros((COUPLINGS,), tl.float64)
    everything = tl.zeros((COUPLINGS,), tl.float64)
    longest = tl.max(end - at, axis=0)
    done = 0
    while done < longest:
        here = at[:, None] + done + tl.arange(0, WIDTH)[None, :]
        inside = here < end[:, None]
        total += tl.sum(tl.load(totals + here, mask=inside, other=0), axis=1)
        everything += tl.sum(tl.load(sums + here, mask=inside, other=0), axis=1)
        done += WIDTH
    finite = tl.abs(tl.sum(everything, axis=0)) < float("inf")
    wrong = tl.zeros((1024,), tl.int32)
    done = 0
    while done < unmeasured:
        here = done + tl.arange(0, 1024)
        wrong += tl.load(bad + here, mask=here < unmeasured, other=0)
        done += 1024
    finite = finite & (tl.sum(wrong, axis=0) == 0)
    counts = finite
    if HAS_OK:
        counts = finite & (tl.load(ok) != 0)
        tl.store(skipped, tl.load(skipped) + ((tl.load(ok) != 0) & (finite == 0)).to(tl.float32))
    else:
        tl.store(skipped, tl.load(skipped) + (finite == 0).to(tl.float32))
    tl.store(good, counts.to(tl.int32))

    # The balance of each chain, in logarithms. links[k, j]: 0 another chain, 1 the same, 2 the same and j not after k.
    link = tl.load(links + k[:, None] * COUPLINGS + k[None, :])
    log = tl.log(total)
    mean = tl.sum(tl.where(link > 0, log[None, :], 0.0), axis=1) / tl.sum((link > 0).to(tl.float64), axis=1)
    step = mean - log
    sound = tl.abs(step) <= limit
    unsound = tl.sum(tl.where((link > 0) & (sound[None, :] == 0), 1, 0), axis=1)
    step = tl.where(unsound == 0, step, 0.0)
    behind = tl.sum(tl.where(link == 2, step[None, :], 0.0), axis=1)
    tl.store(factors + layer_start + k, tl.exp(step), mask=real)
    start = 0
    while start < others:
        other = start + tl.arange(0, 128)
        decay = tl.load(rates + 8 * tl.load(of_other + other, mask=other < others, other=0))
        tl.store(factors + behind_start - others + other, 1 / (1 + decay), mask=other < others)
        start += 128
    factors += behind_start
    tl.store(factors + k, tl.exp(behind), mask=real)
    for p in tl.static_range(POWERS):
        factors += couplings
        power = tl.load(powers + p)
        tl.store(factors + k, tl.exp(power * step), mask=real)
        factors += couplings
        tl.store(factors + k, tl.exp(power * behind), mask=real)


@triton.jit
def _factor(factors, slots, position, inside):
    """A unit's factor times its layer's."""
    unit = tl.load(slots + 3 * position, mask=inside, other=0)
    layer = tl.load(slots + 3 * position + 1, mask=inside, other=0)
    return tl.load(factors + unit) * tl.load(factors + layer)


@triton.jit
def _momentum_factor(factors, slots, position, inside):
    return tl.load(factors + tl.load(slots + 3 * position + 2, mask=inside, other=0))


@triton.jit
def _apply_tile(
    tile,
    at,
    rate,
    slots,
    factors,
    top,
    dtype: tl.constexpr,
    STEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    offsets, inside, rows, row_inside, columns, column_inside = _place(tile, top, HEIGHT, ALIGNED)
    x, m = _moved(at, rate, offsets, inside, dtype, STEP, ALIGNED)
    first, kind = tl.load(tile + 4), tl.load(tile + KIND)
    if kind == BY_COLUMN:
        x *= _factor(factors, slots, first + columns, column_inside)[None, :]
        if STEP == SGD_MOMENTUM:
            m *= _momentum_factor(factors, slots, first + columns, column_inside)[None, :]
    else:
        position = tl.where(kind == BY_ROW, first + rows, first)
        x *= _factor(factors, slots, position, row_inside)[:, None]
        if STEP == SGD_MOMENTUM:
            m *= _momentum_factor(factors, slots, position, row_inside)[:, None]
    tl.store(_begin(at, 0, dtype, ALIGNED) + offsets, x, mask=inside)
    if STEP == SGD_MOMENTUM:
        tl.store(_begin(at, 2, dtype, ALIGNED) + offsets, m, mask=inside)


@triton.jit
def _apply(tiles, addresses, rates, slots, factors, good, dtype: tl.constexpr, STEP: tl.constexpr):
    """Multiply a tile by the factors of its rows or columns, after the step of SGD if it is taken here."""
    if tl.load(good) != 0:
        tile, at, rate = _find(tiles, addresses, rates)
        if tl.load(at + 3) != 0:
            _apply_tile(tile, at, rate, slots, factors, 0, dtype, STEP, HIGH, True)
        else:  # a few rows at a time: with all of them, this rare case would take the registers of the other
            for top in range(0, HIGH, 16):
                _apply_tile(tile, at, rate, slots, factors, top, dtype, STEP, 16, False)


def launch(t: Tables, gauge: Tensor, v_norm: Tensor, limit: float, ok: Tensor | None, skipped: Tensor) -> None:
    """One step for all that the tables name, whose addresses and rates have been sent."""
    slots = t.layout.slots
    what: dict[str, Any] = {
        "dtype": {torch.float32: tl.float32, torch.float64: tl.float64}[t.dtype],
        "STEP": int(t.sgd) + int(t.momentum),
        "num_warps": WARPS,
    }
    seen = t.count if t.sgd else t.measured
    _measure[(seen,)](t.tiles, t.addresses, t.rates, t.partial, t.bad, t.measured, **what)
    _combine[(t.blocks,)](
        t.partial,
        t.members,
        t.ends,
        t.block_table,
        gauge,
        t.rates,
        t.of_coupling,
        v_norm,
        t.factors,
        t.totals,
        t.sums,
        slots.couplings,
        slots.most,
        UNITS=tiles.BLOCK,
        SUMS=128,
        num_warps=4,
    )
    _decide[(1,)](
        t.totals,
        t.sums,
        t.bad,
        t.first_block,
        t.rates,
        t.of_other,
        t.links,
        t.powers,
        skipped if ok is None else ok,
        skipped,
        t.good,
        t.factors,
        slots.couplings,
        slots.others,
        slots.behind,
        slots.one + 1,
        seen - t.measured,
        limit,
        HAS_OK=ok is not None,
        POWERS=len(slots.powers),
        COUPLINGS=len(t.links),
        WIDTH=min(triton.next_power_of_2(t.most_blocks), max(32, 8192 // len(t.links))),
        num_warps=8,
    )
    _apply[(t.count,)](t.tiles, t.addresses, t.rates, t.slots, t.factors, t.good, **what)
