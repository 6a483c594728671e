"""Removing dead units: the same function, fewer units, a plain module of the same classes.

A unit is dead when its output weights are all exactly zero (nothing hears it) or its input weights and biases are (it
says nothing). Its entries are cut out of every parameter and buffer that has a slice of it. Cutting a row of one layer
can leave a unit of the layer before without listeners, so this goes on until nothing more dies.

Nothing is believed: every removal is tried on copies first, at the model's weights and at random ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathprox.constants import fold_constants_
from pathprox.copies import copy_of, fit
from pathprox.dead import even, find_dead, parts_of, spare_half_blocks_
from pathprox.surgery import (
    Cut,
    UnevenError,
    apply_cuts,
    cut_group,
    cut_slice,
    plan_cuts,
    resize_attributes,
    whole_numbers,
)
from pathprox.trial import Trial
from pathprox.units import UnitGroup, Units

ALONE = "a group of a grouped convolution goes only with all of its inputs and outputs"


@torch.no_grad()
def shrink(model: nn.Module, units: Units) -> nn.Module:
    """A copy of ``model`` without its dead units. The original is untouched.

    Units that are only a constant (w = 0, the bias is not) go into the biases of the next layer, where that is exact.
    Groups that the model cannot do without at the old size (a literal number in a ``view``, say) keep their dead
    units, and a warning names them with the line.
    """
    _refuse_strangers(model, units)
    small = copy_of(model)
    _fold_all_(small, units)
    removal = _find(small, units, None)
    removal.warn(units, stacklevel=3)
    removal.apply(small)
    return small


@torch.no_grad()
def shrink_(
    model: nn.Module, units: Units, optimizer: Optimizer | None = None, *, settled: Sequence[Tensor] | None = None
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
    """
    _refuse_strangers(model, units)
    removal = _find(model, units, settled)
    removal.warn(units, stacklevel=3)
    count = sum(int(mask.sum()) for mask in removal.dead[: len(units)])
    if removal.cuts:
        state = _smaller_state(model, removal.cuts, optimizer)
        removal.apply(model)
        for entry, name, tensor in state:
            entry[name] = tensor
        _shrink_units_(units, removal)
    return count


def _fold_all_(small: nn.Module, units: Units) -> None:
    """Silence dead units altogether, fold constants, and again: the one can make more of the other."""
    tensors = dict(small.named_parameters())
    folded = 1
    while folded:
        for group, mask in zip(units.groups, find_dead(units.groups, tensors), strict=True):
            for s in group.into + group.bias + group.out if mask.any() else ():
                weight = tensors[s.name].detach()
                s.scale_(weight, torch.where(mask.to(weight.device), 0.0, 1.0))
        folded = fold_constants_(small, units.groups, fit(units.inputs, small)) if units.inputs else 0


def _refuse_strangers(model: nn.Module, units: Units) -> None:
    if model is not units.model:
        raise ValueError("these units were found in another model. Call find_units on the model that is to be shrunk.")


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

    def warn(self, units: Units, stacklevel: int) -> None:
        """Name the groups whose dead units stay."""
        for i, reason in self.refused.items():
            if i < len(units):
                message = f"dead units of {self.groups[i].name} were kept: {reason}"
                warnings.warn(message, stacklevel=stacklevel + 1)


def _find(model: nn.Module, units: Units, settled: Sequence[Tensor] | None) -> Removal:
    """The largest removal that leaves the function as it is; ``model`` is the units' model or a copy of it."""
    groups = (*units.groups, *units.bundles)
    given = None
    if settled is not None:
        given = [*settled, *(torch.zeros(len(b), dtype=torch.bool) for b in units.bundles)]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    trial = Trial(model, units)
    problems: dict[int, str] = {}

    def plan(choices: Sequence[Choice]) -> Removal | str:
        chosen = [groups[c.number] for c in choices]
        masks = [torch.zeros(len(g), dtype=torch.bool) for g in groups]
        start = None if given is None else [given[c.number] for c in choices]
        for c, mask in zip(choices, find_dead(chosen, tensors, start), strict=True):
            parts = parts_of(groups[c.number], units.bundles) if c.even else None
            masks[c.number] = mask if parts is None else even(mask, parts)
        spare_half_blocks_(groups, masks)
        try:
            cuts = plan_cuts(model, groups, masks)
        except UnevenError as error:
            return str(error)
        return Removal(tuple(choices), groups, masks, cuts, {})

    def attempt(choices: Sequence[Choice]) -> Removal | str:
        removal = plan(choices)
        return removal if isinstance(removal, str) else trial.problem(removal) or removal

    def accept(which: Sequence[Choice], base: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """As many of these as can be taken together with the base."""
        result = attempt((*base, *which))
        if isinstance(result, Removal):
            return (*base, *which)
        if len(which) > 1:
            middle = len(which) // 2
            return accept(which[middle:], accept(which[:middle], base))
        problems[which[0].number] = result
        for other in ways(which[0], base):
            if isinstance(attempt((*base, other)), Removal):
                return (*base, other)
        return base

    def ways(choice: Choice, base: tuple[Choice, ...]) -> Iterator[Choice]:
        """Other ways to shrink a group."""
        for alike in (False, True):
            other = replace(choice, even=alike)
            removal = plan((*base, other))
            if isinstance(removal, Removal):
                yield from [other] if alike else []
                for names in removal.attributes(model, choice.number):
                    yield replace(other, attributes=names)

    dead = find_dead(groups, tensors, given)
    bundles_first = [*range(len(units), len(groups)), *range(len(units))]
    best = attempt(accept([Choice(i) for i in bundles_first if dead[i].any()], ()))
    assert isinstance(best, Removal)
    left = [i for i in range(len(units)) if (dead[i] & ~_covered(groups, best, i)).any()]
    return replace(best, refused={i: problems.get(i, ALONE) for i in left})


def _covered(groups: Sequence[UnitGroup], removal: Removal, number: int) -> Tensor:
    """Units of a group that go, by themselves or in a bundle."""
    gone = removal.dead[number].clone()
    for s in groups[number].into:
        if s.name in removal.cuts:
            here = torch.where(removal.cuts[s.name].keep.reshape(s.shape), 1.0, 0.0)
            gone |= s.total(here) == 0
    return gone


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


def _shrink_units_(units: Units, removal: Removal) -> None:
    """Let the units describe the smaller model."""
    kept = [~mask for mask in removal.dead]
    for i, _ in enumerate(units.groups):
        kept[i] &= ~_covered(removal.groups, removal, i)
    for j in range(len(units.groups), len(removal.groups)):
        kept[j] &= ~_covered(removal.groups, removal, j)
    smaller = [cut_group(g, removal.cuts, mask) for g, mask in zip(removal.groups, kept, strict=True)]
    count = len(units.groups)
    rows = [cut_slice(s, removal.cuts.get(s.name), torch.ones(s.units, dtype=torch.bool)) for s in units.rows()]
    units.become(smaller[:count], smaller[count:], kept[:count], rows)
