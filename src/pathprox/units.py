"""What a unit is: the slices of parameters that belong to it, and what can be asked of them.

A group holds the units of one hidden layer. Its slices are of four kinds: ``into`` (the weights that feed the units,
the paper's w) and ``bias`` (the biases beside them) are multiplied by a when a unit is rescaled; ``out`` (the weights
that the units feed, the paper's v) is divided by a; ``carried`` does not change, and goes away with the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, nn

from pathprox.slices import Slice, slot
from pathprox.text import shortened, table


@dataclass(frozen=True)
class UnitGroup:
    """The units of one hidden layer."""

    into: tuple[Slice, ...]
    """Weights that feed the units: scaled by a."""
    bias: tuple[Slice, ...]
    """Biases beside them: scaled by a."""
    out: tuple[Slice, ...]
    """Weights that the units feed: scaled by 1/a."""
    carried: tuple[Slice, ...] = ()
    """What does not scale but is removed with the unit: a norm's statistics, the layer before it, gates, slopes."""
    homogeneous: bool = True
    """Whether the units can be rescaled. Others (GELU between w and v) can only be removed."""

    @property
    def name(self) -> str:
        return f"{', '.join(self.layers_in)} -> {', '.join(self.layers_out)}"

    @property
    def layers_in(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.layer for s in self.into))

    @property
    def layers_out(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.layer for s in self.out))

    @property
    def layers_carried(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.layer for s in self.carried))

    def __len__(self) -> int:
        return self.into[0].units

    @property
    def weights(self) -> tuple[Slice, ...]:
        """What a penalty on the units holds: w and v, or v alone where units are not homogeneous."""
        return self.into + self.out if self.homogeneous else self.out

    @property
    def meets_itself(self) -> bool:
        """Whether a weight both feeds the units and is fed by them, as in a residual stream: then w and v overlap."""
        return bool({s.name for s in self.into} & {s.name for s in self.out})

    @property
    def slices(self) -> tuple[Slice, ...]:
        return self.into + self.bias + self.out + self.carried


@dataclass(frozen=True)
class LeftOut:
    """A layer whose outputs are not units, and why."""

    layer: str
    reason: str
    """What ends the units, with the operator."""
    where: str = ""
    """file.py:line of that operator in the model's source."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.where})" if self.where else self.reason


class Units(Sequence[UnitGroup]):
    """Every group of units of a model, the couplings that PathProx penalises, and what was left out.

    It refers to the model's own parameters, so it stays valid while they are trained.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[UnitGroup],
        couplings: Iterable[int] = (),
        chains: Iterable[Sequence[int]] = (),
        left_out: Iterable[LeftOut] = (),
        notes: Iterable[str] = (),
        rows: Iterable[Slice] = (),
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        bundles: Iterable[UnitGroup] = (),
    ) -> None:
        self.model = model
        self.groups = tuple(groups)
        self.left_out = tuple(left_out)
        """Layers whose outputs are not units."""
        self.notes = tuple(notes)
        """What else there is to know of the proof."""
        self.inputs = inputs
        """The example that the units were found with: positional arguments, keyword arguments."""
        self.bundles = tuple(bundles)
        """Units that can only be removed together, such as the dimensions of an attention head, taken as one."""
        self._rows = {s.name: s for s in rows}
        self.kept = tuple(torch.arange(len(g)) for g in self.groups)
        """For each group the numbers that its units had when they were found; `shrink_` removes some."""
        self._couplings = tuple(couplings)
        self._chains = tuple(tuple(chain) for chain in chains)

    @overload
    def __getitem__(self, index: int) -> UnitGroup: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[UnitGroup, ...]: ...
    def __getitem__(self, index: int | slice) -> UnitGroup | tuple[UnitGroup, ...]:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    @property
    def couplings(self) -> tuple[UnitGroup, ...]:
        """Groups that share no weight: the ones PathProx penalises."""
        return tuple(self.groups[i] for i in self._couplings)

    @property
    def coupled(self) -> tuple[int, ...]:
        """The places of the couplings among the groups."""
        return self._couplings

    @property
    def chains(self) -> tuple[tuple[UnitGroup, ...], ...]:
        """Runs of groups, each feeding the next through homogeneous operators alone, from coupling to coupling."""
        return tuple(tuple(self.groups[i] for i in chain) for chain in self._chains)

    def become(
        self, groups: Sequence[UnitGroup], bundles: Sequence[UnitGroup], kept: Sequence[Tensor], rows: Iterable[Slice]
    ) -> None:
        """Describe the model after some units were removed; ``kept`` are those that stay, of the present ones."""
        self.groups, self.bundles = tuple(groups), tuple(bundles)
        self.kept = tuple(numbers[mask] for numbers, mask in zip(self.kept, kept, strict=True))
        self._rows = {s.name: s for s in rows}
        self.__dict__.pop("_penalised", None)

    def tensor(self, name: str) -> Tensor:
        """The model's parameter or buffer of that name, as it is now."""
        tensor: Tensor = getattr(*slot(self.model, name))
        return tensor

    def norm(self, slices: Iterable[Slice]) -> Tensor:
        """The Euclidean norm of each unit's entries in these slices, in float64 where the device has it."""
        total: Tensor | None = None
        for s in slices:
            part = s.square_sum(self.tensor(s.name).detach())
            total = part if total is None else total + part.to(total.device)
        if total is None:
            raise ValueError("no slices given: there is no norm of nothing")
        return total.sqrt()

    def path_norm(self, group: UnitGroup) -> Tensor:
        """|w| |v| of every unit of a group; |v| alone where they are not homogeneous."""
        return self.norm(group.into) * self.norm(group.out) if group.homogeneous else self.norm(group.out)

    def path_norms(self) -> list[Tensor]:
        """The path norms of all units, one tensor a group."""
        return [self.path_norm(g) for g in self.groups]

    def active(self, threshold: float = 0.0) -> list[Tensor]:
        """Which units have a path norm above ``threshold`` (0: which are not exactly zero), one tensor a group."""
        return [norms > threshold for norms in self.path_norms()]

    def count_active(self, threshold: float = 0.0) -> tuple[int, int]:
        """(active units, all units) over the couplings, as the paper counts them."""
        alive = [self.path_norm(g) > threshold for g in self.couplings]
        return sum(int(a.sum()) for a in alive), sum(len(a) for a in alive)

    def rows(self) -> list[Slice]:
        """Every penalised weight, cut into rows: all that feeds one output of its layer.

        Penalised are the weights of units and all parameters of two or more dimensions; biases are not.
        """
        return list(self._penalised)

    @cached_property
    def _penalised(self) -> tuple[Slice, ...]:
        weights = {s.name for group in self.groups for s in group.weights}
        biases = {s.name for group in self.groups for s in group.bias}
        found = []
        for name, parameter in self.model.named_parameters():
            if name in weights or (parameter.dim() >= 2 and name not in biases):
                count = parameter.shape[0]
                rows = Slice(name, tuple(parameter.shape), (0,), torch.arange(count), count)
                found.append(self._rows.get(name, rows))
        return tuple(found)

    def others(self, couplings: Sequence[UnitGroup] | None = None) -> list[Slice]:
        """Penalised weights that no coupling holds: they get ordinary weight decay.

        Each is a slice of a single unit; of a parameter that couplings hold in part, it is the rest.
        """
        held = [s for group in (self.couplings if couplings is None else couplings) for s in group.weights]
        rest = (s.rest([h for h in held if h.name == s.name]) for s in self.rows())
        return [s for s in rest if s is not None]

    def to_dict(self) -> dict[str, object]:
        """The table, for machines."""
        coupled = set(self._couplings)
        return {
            "groups": [
                {
                    "into": g.layers_in,
                    "out": g.layers_out,
                    "units": len(g),
                    "active": int(a.sum()),
                    "coupled": i in coupled,
                    "homogeneous": g.homogeneous,
                }
                for i, (g, a) in enumerate(zip(self.groups, self.active(), strict=True))
            ],
            "bundles": [{"into": g.layers_in, "out": g.layers_out, "units": len(g)} for g in self.bundles],
            "left_out": [{"layer": x.layer, "reason": x.reason, "where": x.where} for x in self.left_out],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        coupled = set(self._couplings)
        head = ("units", "active", "fed by (w)", "feeding (v)", "penalty")
        rows = [
            (
                str(len(g)),
                str(int(a.sum())),
                shortened(g.layers_in),
                shortened(g.layers_out),
                ("path norm" if g.homogeneous else "group lasso on v") if i in coupled else "-",
            )
            for i, (g, a) in enumerate(zip(self.groups, self.active(), strict=True))
        ]
        total = sum(len(g) for g in self.groups)
        inside = sum(len(g) for g in self.couplings)
        lines = [
            f"{total} units in {len(self)} groups, {inside} of them in {len(coupled)} couplings",
            *table(head, rows),
        ]
        if self.bundles:
            bundled = [
                (str(len(g)), shortened(g.layers_in), shortened(g.layers_out), shortened(g.layers_carried))
                for g in self.bundles
            ]
            lines += ["", "units of one head or gate, which can only be removed together with what is carried:"]
            lines += table(("bundles", "fed by (w)", "feeding (v)", "carried"), bundled)
        if self.left_out:
            lines += ["", "outputs that are not units:"]
            lines += table(("layer", "reason"), [(x.layer, str(x)) for x in self.left_out])
        others = [s.name if s.whole else f"part of {s.name}" for s in self.others()]
        if others:
            lines += ["", f"ordinary weight decay: {', '.join(others)}"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Units({len(self)} groups, {len(self._couplings)} couplings, {sum(map(len, self.groups))} units)"
