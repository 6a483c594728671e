"""Where in memory the units of a plan lie: parameters as matrices whose rows or columns each take one factor.

A *slot* is the place of a factor in the vector of all factors, which is

    w of each unit | v of each unit | other weights | biases behind each coupling | state | 1

with room for as many units in every coupling as the largest has. "State" is, for each power that the optimizer's
memory follows a weight by, the factor of each coupling's v and that of the biases behind it, to that power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor, nn

from pathprox.balance import Chain
from pathprox.coupling import Coupling
from pathprox.slices import Slice


class UnfitError(Exception):
    """Not everything is one factor a row or column: the plan is left to the general path."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter as (batches, rows, columns), in the order of its memory."""

    parameter: nn.Parameter
    shape: tuple[int, int, int]
    by_row: bool
    """Whether a position is a row, the only one of its batch; else it is a column of a batch."""
    slots: Tensor
    """For each position the slot of its factor."""
    state: str = ""
    """The optimizer's tensor that is meant; empty: the parameter itself."""

    @property
    def positions(self) -> tuple[int, int, int]:
        """The shape of one number a position, to multiply the view with."""
        return self.shape[0], 1, 1 if self.by_row else self.shape[2]

    def view(self, tensor: Tensor) -> Tensor:
        _, rows, columns = self.shape
        return tensor.as_strided(self.shape, (rows * columns, columns, 1))


@dataclass(frozen=True)
class Slots:
    couplings: int
    most: int
    """Units in the largest coupling."""
    others: int
    powers: tuple[int, ...]

    @property
    def v(self) -> int:
        return self.couplings * self.most

    @property
    def other(self) -> int:
        return 2 * self.v

    @property
    def behind(self) -> int:
        return self.other + self.others

    @property
    def state(self) -> int:
        return self.behind + self.couplings

    @property
    def one(self) -> int:
        """The last: the factor of what no unit owns."""
        return self.state + 2 * self.couplings * len(self.powers)

    def of_state(self, power: int, chained: Tensor) -> Tensor:
        """For every slot, that of the state's factor when the weights at the slot are multiplied; `one` for others."""
        start = self.state + 2 * self.couplings * self.powers.index(power)
        found = torch.full((self.one + 1,), self.one)
        v = torch.where(chained, start + torch.arange(self.couplings), self.one)
        found[self.v : self.other] = v.repeat_interleave(self.most)
        found[self.behind : self.state] = start + self.couplings + torch.arange(self.couplings)
        return found


@dataclass(frozen=True, eq=False)
class Layout:
    slots: Slots
    sizes: tuple[int, ...]
    """Units of each coupling."""
    pieces: list[Piece]
    """Every parameter that is multiplied. The first ``measured`` hold w or v."""
    measured: int
    states: list[Piece]
    """What the optimizer remembers of weights and biases that the balance rescales."""
    chains: Tensor
    """For each chain its couplings, filled up with the number of couplings."""
    groups: tuple[list[int], list[int]]
    """The parameter group that the v of each coupling is in, and each other weight."""
    stepping: frozenset[int] = field(repr=False)
    """Parameters, by id, that have to take part in the step."""

    @cached_property
    def used(self) -> frozenset[int]:
        """The parameter groups whose step size is needed."""
        return frozenset(self.groups[0] + self.groups[1])

    @cached_property
    def links(self) -> Tensor:
        """How couplings are chained: 2 where the second is in the first one's chain and not after it, 1 after it."""
        found = 2 * torch.eye(self.slots.couplings, dtype=torch.int8)
        for row in self.chains:
            chain = row[row < self.slots.couplings]
            found[chain[:, None], chain] = 1 + torch.ones(len(chain), len(chain)).tril().to(torch.int8)
        return found


def make_layout(
    couplings: Sequence[Coupling],
    others: Sequence[Slice],
    chains: Sequence[Chain],
    parameter: Callable[[Slice], nn.Parameter],
    group_of: Mapping[int, int],
    powers: Mapping[str, int],
) -> Layout:
    """Lay a plan out, or raise `UnfitError`. ``group_of`` gives each trained parameter's group, by id."""
    if not couplings or not all(c.held for c in couplings):
        raise UnfitError
    others = [s for s in others if id(parameter(s)) in group_of]
    kinds = tuple(sorted({power for power in powers.values() if power})) if chains else ()
    slots = Slots(len(couplings), max(len(c.group) for c in couplings), len(others), kinds)
    number = {id(c.group): k for k, c in enumerate(couplings)}

    def group(slices: Sequence[Slice]) -> int:
        """With two groups there may be two step sizes, and then one factor a unit is not enough."""
        found = {group_of[id(parameter(s))] for s in slices}
        if len(found) > 1:
            raise UnfitError
        return found.pop()

    def piece(s: Slice, start: int, step: int = 0) -> Piece:
        return lay_out(s, parameter(s), start + step * torch.arange(s.units), slots.one)

    w = [piece(s, k * slots.most, 1) for k, c in enumerate(couplings) for s in c.into]
    v = [piece(s, slots.v + k * slots.most, 1) for k, c in enumerate(couplings) for s in c.group.out]
    rest = [piece(s, slots.other + i) for i, s in enumerate(others)]
    biases = [
        piece(s, slots.behind + number[id(group)])
        for chain in chains
        for group, between in zip(chain.couplings, chain.between, strict=False)
        for s in between
    ]
    for c in couplings:
        group(c.into)
    pieces = merged([*w, *v, *rest, *biases], slots.one)
    members = torch.full((len(chains), max((len(chain.couplings) for chain in chains), default=0)), len(couplings))
    for row, chain in zip(members, chains, strict=True):
        row[: len(chain.couplings)] = torch.tensor([number[id(group)] for group in chain.couplings])
    chained = torch.isin(torch.arange(len(couplings)), members)
    coupled = {id(p.parameter) for p in w + v}
    return Layout(
        slots,
        tuple(len(c.group) for c in couplings),
        pieces,
        len(coupled),
        [
            replace(p, slots=mine, state=key)
            for key, power in powers.items()
            if power in kinds
            for p in pieces
            if bool(((mine := slots.of_state(power, chained)[p.slots]) != slots.one).any())
        ],
        members,
        ([group(c.group.out) for c in couplings], [group([s]) for s in others]),
        frozenset(coupled | {id(p.parameter) for p in rest}),
    )


def lay_out(s: Slice, parameter: nn.Parameter, slots: Tensor, one: int) -> Piece:
    """The slice's parameter; ``slots`` are those of the units, ``one`` is for what none of them owns.

    Positions may come first in memory (the rows of a w), last (the columns of a v) or both (the columns of each block
    of a grouped convolution), and a column may be several numbers wide (a kernel).
    """
    view = s.view(parameter.detach())
    order = sorted((d for d, size in enumerate(view.shape) if size > 1), key=view.stride, reverse=True)
    flat = [d for d in range(view.dim()) if d not in order]
    if not view.permute(*order, *flat).is_contiguous():
        raise UnfitError
    inside = [s.dims.index(d) for d in (*order, *flat) if d in s.dims]
    owner = s.owner.view([view.shape[d] for d in s.dims]).permute(inside).flatten()
    slots = torch.cat([slots, torch.tensor([one])])[owner]
    runs = [(owned, math.prod(view.shape[d] for d in ds)) for owned, ds in groupby(order, lambda d: d in s.dims)]
    if len(slots) == 1 or [owned for owned, _ in runs] == [True, False]:
        return Piece(parameter, (len(slots), 1, view.numel() // len(slots)), True, slots)
    batches = runs.pop(0)[1] if len(runs) > 1 and runs[0][0] else 1
    rows = runs.pop(0)[1] if not runs[0][0] else 1
    columns = runs.pop(0)[1]
    width = runs.pop(0)[1] if runs else 1
    if runs:
        raise UnfitError
    return Piece(parameter, (batches, rows, columns * width), False, slots.repeat_interleave(width))


def merged(pieces: Iterable[Piece], one: int) -> list[Piece]:
    """One piece for each parameter, of which several slices may own parts."""
    found: dict[int, Piece] = {}
    for new in pieces:
        old = found.setdefault(id(new.parameter), new)
        if old is not new:
            if (old.shape, old.by_row) != (new.shape, new.by_row) or ((old.slots != one) & (new.slots != one)).any():
                raise UnfitError
            found[id(new.parameter)] = replace(old, slots=torch.where(old.slots == one, new.slots, old.slots))
    return list(found.values())
