"""Which entries of a parameter belong to which unit, and the few things that are done with them.

Linear, convolution and norm layers share one path: a view of the parameter, the dimensions that count positions, and an
index that says whose each position is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn


def slot(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and the attribute it is there."""
    layer, _, leaf = name.rpartition(".")
    return model.get_submodule(layer), leaf


@dataclass(frozen=True, eq=False)
class Slice:
    """The entries of one parameter (or buffer) that belong to the units of a group."""

    name: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    """The shape the parameter is viewed in (its own, or with the groups of a grouped convolution split off)."""
    dims: tuple[int, ...]
    """The dimensions of that view that count the positions a unit can own."""
    owner: Tensor = field(repr=False)
    """For each position (flattened over ``dims``) the unit that owns it, or -1."""
    units: int
    """Number of units in the group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.owner.to(torch.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        mine = (self.name, self.shape, self.dims, self.units)
        return mine == (other.name, other.shape, other.dims, other.units) and torch.equal(self.owner, other.owner)

    def __hash__(self) -> int:
        return hash((self.name, self.shape, self.dims, self.units))

    @property
    def layer(self) -> str:
        """The module that holds the parameter."""
        return self.name.rpartition(".")[0] or self.name

    def rest(self, taken: Sequence[Slice]) -> Slice | None:
        """What none of the ``taken`` slices of this parameter owns, as a slice of one unit; None if nothing is left."""
        like = taken[0] if taken else self
        free = torch.stack([torch.ones(len(like.owner), dtype=torch.bool), *(s.owner < 0 for s in taken)]).all(0)
        return Slice(self.name, like.shape, like.dims, torch.where(free, 0, -1), 1) if free.any() else None

    @cached_property
    def whole(self) -> bool:
        """Whether every entry of the parameter belongs to some unit."""
        return bool((self.owner >= 0).all())

    @cached_property
    def _identity(self) -> bool:
        """Position i belongs to unit i: nothing to look up."""
        return torch.equal(self.owner, torch.arange(self.units))

    @cached_property
    def _members(self) -> Tensor:
        """For each unit the positions it owns, padded with the one past the last."""
        positions = len(self.owner)
        counts = torch.bincount(self.owner[self.owner >= 0], minlength=self.units)
        order = torch.argsort(self.owner, stable=True)[positions - int(counts.sum()) :]
        members = torch.full((self.units, int(counts.max())), positions)
        members[torch.arange(members.shape[1]) < counts[:, None]] = order
        return members

    @cached_property
    def _on_device(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _index(self, which: str, device: torch.device) -> Tensor:
        if (which, device) not in self._on_device:
            self._on_device[which, device] = getattr(self, which).to(device)
        return self._on_device[which, device]

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def view(self, tensor: Tensor) -> Tensor:
        """The parameter, or a tensor of its shape, in the slice's own view."""
        return tensor if tensor.shape == self.shape else tensor.view(self.shape)

    def _rest(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.dims)

    def gather(self, tensor: Tensor) -> Tensor:
        """A matrix with one row a unit: all of its entries, short rows filled with zeros."""
        rows = self.view(tensor).permute(*self.dims, *self._rest()).reshape(len(self.owner), -1)
        if self._identity:
            return rows
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return padded[self._index("_members", tensor.device)].flatten(1)

    def square_sum(self, tensor: Tensor) -> Tensor:
        """The sum of squares of every unit's entries, in float64 where the device has it."""
        rest = self._rest()
        view = self.view(tensor)
        wide = view.dtype if view.device.type == "mps" else torch.float64  # long float32 sums lose more than 1e-6
        return self._per_unit(
            (torch.linalg.vector_norm(view, dim=rest, dtype=wide) if rest else view.to(wide)).square()
        )

    def total(self, view: Tensor) -> Tensor:
        """The sum of every unit's entries in a tensor shaped like the view (other dimensions may be summed already)."""
        rest = self._rest()
        return self._per_unit(view.sum(rest) if rest else view)

    def any(self, view: Tensor) -> Tensor:
        """Whether some of each unit's entries is true, for a boolean tensor shaped like the view."""
        rest = self._rest()
        return self._per_unit((view.any(rest) if rest else view).float()) > 0

    def _per_unit(self, values: Tensor) -> Tensor:
        values = values.flatten()
        if self._identity:
            return values
        padded = torch.cat([values, values.new_zeros(1)])
        return padded[self._index("_members", values.device)].sum(1)

    def expand(self, values: Tensor, fill: float = 1.0) -> Tensor:
        """One value a unit, shaped to multiply the view; ``fill`` for entries that no unit owns."""
        if not self._identity:
            values = torch.cat([values, values.new_full((1,), fill)])[self._index("owner", values.device)]
        shape = [size if d in self.dims else 1 for d, size in enumerate(self.shape)]
        return values.view(shape)

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply every unit's entries by its factor, in place. The factors may be on another device."""
        self.view(tensor).mul_(self.expand(factor.to(tensor)))

    def write_(self, tensor: Tensor, rows: Tensor) -> None:
        """Put back what `gather` gave."""
        view = self.view(tensor).permute(*self.dims, *self._rest())
        if self._identity:
            view.copy_(rows.reshape(view.shape))
            return
        members = self._index("_members", tensor.device)
        rows = rows.reshape(members.numel(), *view.shape[len(self.dims) :])
        there = members.flatten() < len(self.owner)
        where = torch.unravel_index(members.flatten()[there], view.shape[: len(self.dims)])
        view[where] = rows[there].to(view.dtype)
