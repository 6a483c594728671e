"""What can be removed from a model, and how: tried, not believed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pathprox.dead import checked_multiple, even, find_dead, keep_multiple, parts_of, spare_half_blocks_
from pathprox.surgery import Cut, UnevenError, apply_cuts, plan_cuts, resize_attributes, whole_numbers
from pathprox.trial import Trial
from pathprox.units import UnitGroup, Units

ALONE = "a group of a grouped convolution goes only with all of its inputs and outputs"


@dataclass(frozen=True)
class Choice:
    """A group that is shrunk, and what has to be done for it."""

    number: int
    """Its place among the groups and, behind them, the bundles."""
    even: bool = False
    """Take as many units from each part (each head, each group of a convolution)."""
    attributes: frozenset[str] = frozenset()
    """What the modules that hold its layers have to be told: these of their attributes get the new size."""


@dataclass(frozen=True)
class Removal:
    """What is removed from a model."""

    choices: tuple[Choice, ...]
    groups: tuple[UnitGroup, ...]
    dead: list[Tensor]
    """For each group, and then each bundle, the units that go."""
    cuts: dict[str, Cut]
    refused: dict[int, str]
    """Groups that keep dead units, and why."""

    def apply(self, model: nn.Module) -> None:
        apply_cuts(model, self.cuts)
        for choice in self.choices:
            for module in self._parents(model, choice.number) if choice.attributes else ():
                resize_attributes(module, self._sizes(choice.number), choice.attributes)

    def attributes(self, model: nn.Module, number: int) -> list[frozenset[str]]:
        """What might have to be told to the modules that hold a group's layers: all there is, or one thing alone."""
        sizes = self._sizes(number)
        names = sorted({n for m in self._parents(model, number) for n in whole_numbers(m) if getattr(m, n) in sizes})
        return [frozenset(names), *(frozenset([n]) for n in names if len(names) > 1)] if names else []

    def _parents(self, model: nn.Module, number: int) -> list[nn.Module]:
        names = {s.layer.rpartition(".")[0] for s in self.groups[number].slices}
        return [model.get_submodule(name) for name in sorted(names)]

    def _sizes(self, number: int) -> dict[int, int]:
        """Old sizes and new ones: of the group, and of the parameters it is cut out of."""
        sizes = {len(self.dead[number]): int((~self.dead[number]).sum())}
        for s in self.groups[number].slices:
            if s.name in self.cuts:
                cut = self.cuts[s.name]
                sizes |= {a: b for a, b in zip(cut.keep.shape, cut.shape, strict=True) if a != b}
        return sizes

    def covered(self, number: int) -> Tensor:
        """Units of a group that go, by themselves or in a bundle."""
        gone = self.dead[number].clone()
        for s in self.groups[number].into:
            if s.name in self.cuts:
                gone |= ~s.any(self.cuts[s.name].keep.reshape(s.shape))
        return gone

    def warn(self, stacklevel: int) -> None:
        """Name the groups whose dead units stay."""
        for i, reason in self.refused.items():
            warnings.warn(f"dead units of {self.groups[i].name} were kept: {reason}", stacklevel=stacklevel + 1)


class Search:
    """Looks for the largest removal that leaves a model's function as it is."""

    def __init__(
        self, model: nn.Module, units: Units, settled: Sequence[Tensor] | None = None, multiple_of: int = 1
    ) -> None:
        self.multiple_of = checked_multiple(multiple_of)
        """Of each group so many units are left, or twice as many, and so on."""
        self.model = model
        """The units' model, or a copy of it."""
        self.units = units
        self.groups = (*units.groups, *units.bundles)
        self.given = None
        """For each group the units that may go, if not all dead ones may."""
        if settled is not None:
            self.given = [*settled, *(torch.zeros(len(b), dtype=torch.bool) for b in units.bundles)]
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.problems: dict[int, str] = {}

    def run(self) -> Removal:
        count = len(self.units)
        dead = [self._sparing(*found) for found in enumerate(find_dead(self.groups, self.tensors, self.given))]
        choices = [Choice(i) for i in (*range(count, len(self.groups)), *range(count)) if dead[i].any()]
        nothing = self._plan(())
        assert isinstance(nothing, Removal)
        if not choices:
            return nothing
        self.trial = Trial(self.model, self.units)
        best = self._accept(choices, nothing)
        left = [i for i in range(count) if (dead[i] & ~best.covered(i)).any()]
        return replace(best, refused={i: self.problems.get(i, ALONE) for i in left})

    def _accept(self, which: Sequence[Choice], base: Removal) -> Removal:
        """The base, and as many of these as can be taken together with it."""
        result = self._attempt((*base.choices, *which))
        if isinstance(result, Removal):
            return result
        if len(which) > 1:
            middle = len(which) // 2
            return self._accept(which[middle:], self._accept(which[:middle], base))
        self.problems[which[0].number] = result
        others = (self._attempt((*base.choices, way)) for way in self._ways(which[0], base))
        return next((other for other in others if isinstance(other, Removal)), base)

    def _ways(self, choice: Choice, base: Removal) -> Iterator[Choice]:
        """Other ways to shrink a group."""
        apart = parts_of(self.groups[choice.number], self.units.bundles) is not None
        for alike in (False, True) if apart else (False,):
            other = replace(choice, even=alike)
            if alike:
                yield other
            removal = self._plan((*base.choices, other))
            if isinstance(removal, Removal):
                for names in removal.attributes(self.model, choice.number):
                    yield replace(other, attributes=names)

    def _attempt(self, choices: tuple[Choice, ...]) -> Removal | str:
        """The removal of these groups' dead units, or what is wrong with it."""
        removal = self._plan(choices)
        return removal if isinstance(removal, str) else self.trial.problem(removal) or removal

    def _sparing(self, number: int, dead: Tensor) -> Tensor:
        """The units of a group that may go, so that a multiple is left; bundles have no such number."""
        return keep_multiple(dead, self.multiple_of) if number < len(self.units) else dead

    def _plan(self, choices: tuple[Choice, ...]) -> Removal | str:
        dead = [torch.zeros(len(g), dtype=torch.bool) for g in self.groups]
        given = None if self.given is None else [self.given[c.number] for c in choices]
        found = find_dead([self.groups[c.number] for c in choices], self.tensors, given)
        for c, mask in zip(choices, found, strict=True):
            parts = parts_of(self.groups[c.number], self.units.bundles) if c.even else None
            spared = self._sparing(c.number, mask) if parts is None else even(mask, parts, self.multiple_of)
            dead[c.number] = spared
        spare_half_blocks_(self.groups, dead)
        try:
            return Removal(choices, self.groups, dead, plan_cuts(self.model, self.groups, dead), {})
        except UnevenError as error:
            return str(error)
