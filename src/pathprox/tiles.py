"""What the kernels of `pathprox.kernels` need to know: tensors cut into tiles, where they lie, and the rates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pathprox.layout import Layout, Piece

ROWS, COLUMNS = 64, 64
"""The size of a tile."""
BLOCK = 8
"""Units that are combined together."""
BY_ROW, BY_COLUMN, WHOLE = 0, 1, 2
"""What a factor belongs to: a row, a column (of a batch of rows), or all of a tensor."""
FIELDS, KIND, GROUP = 9, 7, 8
"""A tile has nine numbers: those of `_numbered`, and its piece's columns, numbers in all, kind and parameter group."""
SPARE = 8
"""How many CUDA graphs can be captured without a step of the ordinary kind in between."""
Address = tuple[int, int, int]
"""Of the weights, their gradients and their momentum; 0 for what is not there."""


class Sent:
    """Addresses and rates on the device, in one piece of memory so that one copy brings them there."""

    def __init__(self, pieces: int, groups: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(4 * pieces + 8 * groups, dtype=torch.int64, pin_memory=pinned)
        self.here = torch.zeros(4 * pieces + 8 * groups, dtype=torch.int64, device=device)
        self.addresses = self.here[: 4 * pieces]
        self.rates = self.here[4 * pieces :].view(torch.float64)
        self.contents: Any = None

    def send(self, contents: Any, addresses: list[int], rates: list[float]) -> None:
        self.contents = contents
        self.host[: len(addresses)] = torch.tensor(addresses)
        self.host[len(addresses) :].view(torch.float64)[:] = torch.tensor(rates, dtype=torch.float64)
        self.here.copy_(self.host, non_blocking=True)


class Tables:
    """The pieces of a layout, cut into tiles. With ``sgd`` the kernels take the optimizer's step as well.

    ``groups`` has each piece's parameter group. The first pieces are the layout's measured ones.
    """

    def __init__(
        self, layout: Layout, pieces: Sequence[Piece], groups: Sequence[int], sgd: bool = False, momentum: bool = False
    ) -> None:
        first = pieces[0].parameter
        device, self.dtype = first.device, first.dtype
        self.layout, self.made_of, self.sgd, self.momentum = layout, pieces, sgd, momentum
        cut = [_cut(p, whole=i >= layout.measured and len(p.slots) == 1) for i, p in enumerate(pieces)]
        starts = accumulate((len(p.slots) for p in pieces), initial=0)
        tiles = torch.cat([_numbered(x, i, start) for i, ((_, x), start) in enumerate(zip(cut, starts, strict=False))])
        head = torch.tensor([[*row, group] for (row, _), group in zip(cut, groups, strict=True)])
        self._fits = [row[0] % 4 == 0 and row[1] % 4 == 0 for row, _ in cut]
        self.measured = sum(len(x) for _, x in cut[: layout.measured])
        self.count = len(tiles)
        self._make(layout, pieces, tiles, head, device)
        self.groups = 1 + max([*groups, *layout.used])
        self._new = lambda: Sent(len(pieces), self.groups, device)
        self._sent, self._spare, self._captured = self._new(), [self._new() for _ in range(SPARE)], list[Sent]()

    def _make(self, layout: Layout, pieces: Sequence[Piece], tiles: Tensor, head: Tensor, device: torch.device) -> None:
        slots = layout.slots
        positions = torch.cat([p.slots for p in pieces])
        members, ends = _members(tiles[: self.measured], head, positions, slots.other)
        blocks, first_block = _blocks(layout)
        links = 2 * torch.eye(max(4, 1 << (slots.couplings - 1).bit_length()), dtype=torch.int8)
        links[: slots.couplings, : slots.couplings] = layout.links
        layers = torch.full_like(positions, slots.one)
        is_v = (positions >= slots.v) & (positions < slots.other)
        layers[is_v] = slots.one + 1 + (positions[is_v] - slots.v) // slots.most
        followed = {id(s.parameter): s.slots for s in layout.states} if self.momentum else {}
        states = torch.cat([followed.get(id(p.parameter), torch.full_like(p.slots, slots.one)) for p in pieces])
        known = torch.cat([tiles, head[tiles[:, 0]]], 1), torch.stack([positions, layers, states], 1)
        self.tiles, self.slots = (x.int().to(device) for x in known)
        """What is known of each tile; which factors each position's weights and its momentum are multiplied by."""
        self.members, self.ends, self.block_table, self.first_block = (
            x.int().to(device) for x in (members, ends, blocks, first_block)
        )
        self.of_coupling, self.of_other = (torch.tensor(g, dtype=torch.int32, device=device) for g in layout.groups)
        self.blocks, self.links = len(blocks), links.to(device)
        self.most_blocks = int(first_block.diff().max())
        wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.powers = torch.tensor(slots.powers or (0,), **wide)
        self.partial = torch.zeros(self.measured * COLUMNS, dtype=self.dtype, device=device)
        self.totals, self.sums = torch.zeros(self.blocks, **wide), torch.zeros(self.blocks, **wide)
        self.factors = torch.ones(slots.one + 1 + slots.couplings, dtype=self.dtype, device=device)
        self.bad = torch.zeros(max(1, self.count - self.measured), dtype=torch.int32, device=device)
        self.good = torch.zeros(1, dtype=torch.int32, device=device)

    def send(self, addresses: Sequence[Address], rates: Sequence[Sequence[Tensor | float]], capturing: bool) -> bool:
        """Tell the device where the tensors are, and the rates of each group; False where a graph cannot be told."""
        numbers = [x for row in rates for x in row]
        moving = {i: x for i, x in enumerate(numbers) if isinstance(x, Tensor)}
        contents = None if moving else (list(addresses), numbers)
        if capturing:
            if not self._spare:
                return False
            self._sent = self._spare.pop()
            self._captured.append(self._sent)  # the graph copies from it in every replay
        elif contents is None or contents != self._sent.contents or self._sent in self._captured:
            self._sent = self._new()  # the old one's copy may still be under way
            self._spare += [self._new() for _ in range(SPARE - len(self._spare))]
        else:
            return True
        flat = [
            x
            for address, fits in zip(addresses, self._fits, strict=True)
            for x in (*address, int(fits and not any(a % 16 for a in address)))
        ]
        self._sent.send(contents, flat, [0.0 if i in moving else float(x) for i, x in enumerate(numbers)])
        for i, x in moving.items():
            self._sent.rates[i].copy_(x)
        return True

    @property
    def can_be_captured(self) -> bool:
        return bool(self._spare)

    @property
    def addresses(self) -> Tensor:
        return self._sent.addresses

    @property
    def rates(self) -> Tensor:
        return self._sent.rates


def _cut(piece: Piece, whole: bool) -> tuple[list[int], Tensor]:
    """(columns, numbers in all, kind), and for each tile its first row, the end of its rows, first column, batch."""
    batches, rows, columns = piece.shape
    count, kind, high = batches * rows * columns, BY_COLUMN, rows
    if whole:
        columns, kind = COLUMNS, WHOLE
        batches, high = 1, -(-count // columns)
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
    """For each unit the sums that the tiles give it, one unit after the other, and where each unit's begin."""
    piece, row, row_end, column, first = tiles.unbind(1)
    by_row = pieces[piece, 2] == BY_ROW
    start = torch.where(by_row, row, column)
    end = torch.where(by_row, torch.minimum(row_end, row + ROWS), torch.minimum(pieces[piece, 0], column + COLUMNS))
    place = start[:, None] + torch.arange(COLUMNS)
    there = place < end[:, None]
    slot = torch.where(there, slots[torch.where(there, first[:, None] + place, 0)], units).flatten()
    counts = torch.bincount(slot.clamp_max(units), minlength=units + 1)[:units]
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return torch.argsort(slot, stable=True)[: int(ends[-1])], ends


def _blocks(layout: Layout) -> tuple[Tensor, Tensor]:
    """(coupling, first unit, number of its units) of each block, and the first block of each coupling."""
    blocks = [(k, i, size) for k, size in enumerate(layout.sizes) for i in range(0, size, BLOCK)]
    counts = [0, *(-(-size // BLOCK) for size in layout.sizes)]
    return torch.tensor(blocks), torch.tensor(list(accumulate(counts)))
