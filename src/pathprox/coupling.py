"""What PathProx keeps of each coupling, and of the whole network, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pathprox.balance import Chain
from pathprox.slices import Slice
from pathprox.units import UnitGroup

_UNSET = torch.empty(0)


@dataclass(eq=False)
class Coupling:
    """A group that is penalised, and what is known of it in this step."""

    group: UnitGroup
    into: tuple[Slice, ...]
    """The slices that make up w."""
    gauge: Tensor | None = None
    """The norm that each w is held at; None before it is first penalised."""
    held: bool = False
    """Whether w is free to be projected."""
    waiting: bool = False
    """Whether some unit has w = 0."""
    versions: list[int] = field(default_factory=list)
    """How often the tensors of w had been written to when it was last brought to its norm."""
    w_norm: Tensor = _UNSET
    v_norm: Tensor = _UNSET
    w_gauge: Tensor = _UNSET
    """|w| in the penalty |w| |v|: the gauge, or what the norm is where w is not held."""
    v_factor: Tensor = _UNSET
    asleep: Tensor = _UNSET
    """For how many steps in a row each unit has been dead."""


@dataclass(frozen=True)
class Plan:
    key: tuple[tuple[int, ...], ...]
    """The parameters that are trained, by id, in each group of the optimizer."""
    couplings: list[Coupling]
    others: list[Slice]
    chains: list[Chain]


def common(steps: Sequence[Tensor | float]) -> Tensor | float | None:
    """The one number that all step sizes are, if they are."""
    first = steps[0]
    if isinstance(first, Tensor):
        return first if first.dim() == 0 and all(step is first for step in steps) else None
    return first if all(not isinstance(step, Tensor) and step == first for step in steps) else None
