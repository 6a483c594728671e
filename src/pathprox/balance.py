"""Rescalings that leave the network's function as it is.

Three levels. *Units*: |w| = |v| for every unit of the couplings, where the weight-decay objective meets the path-norm
objective. *Layers*: all couplings of a chain have the same total path norm (the paper's layer-wise balance).
*Network*: the smallest sum of squared weights over all rescalings of all groups, that is, the representation that
weight decay would choose for this function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from pathprox.slices import Slice
from pathprox.smallest import smallest_squares
from pathprox.stepsize import carry_state_, unwrapped
from pathprox.units import UnitGroup, Units

BALANCED = 1e-5
"""Totals that differ by less than this, relatively, count as equal."""

Level = Literal["units", "layers", "network"]


@torch.no_grad()
def balance_(units: Units, level: Level = "network", optimizer: Optimizer | None = None) -> None:
    """Rescale the model's weights in place; its function stays the same.

    A dead unit (v = 0) weighs nothing in any representation, so "units" and "network" set its w and bias to zero as
    well. Give the optimizer if training goes on, so that its momentum follows the weights.
    """
    optimizer = None if optimizer is None else unwrapped(optimizer)
    if level == "layers":
        for chain in find_links(units):
            balance_chain_(units, chain, optimizer)
    elif level in ("units", "network"):
        groups = units.couplings if level == "units" else units.groups
        solution = smallest_squares(units, [g for g in groups if g.homogeneous])
        for group, into, out in zip(solution.groups, solution.into, solution.out, strict=True):
            rescale_(units, group, into, out, optimizer)
    else:
        raise ValueError(f"level must be 'units', 'layers' or 'network', not {level!r}")


def rescale_(units: Units, group: UnitGroup, into: Tensor, out: Tensor, optimizer: Optimizer | None = None) -> None:
    """Multiply what feeds the units by ``into`` and what they feed by ``out``, its inverse: the function stays."""
    for s in group.into + group.bias:
        scale_(units, s, into, optimizer)
    for s in group.out:
        scale_(units, s, out, optimizer)


def scale_(units: Units, s: Slice, factor: Tensor, optimizer: Optimizer | None = None) -> None:
    """Multiply a slice by one factor a unit, and let the optimizer's state follow."""
    s.scale_(units.tensor(s.name).detach(), factor)
    if optimizer is not None:
        scale_state_(units, s, factor, optimizer)


def scale_state_(units: Units, s: Slice, factor: Tensor, optimizer: Optimizer) -> None:
    """The optimizer's memory of a slice that was multiplied by ``factor``; as it is where that is zero."""
    safe = torch.where(factor == 0, 1, factor)
    carry_state_(optimizer, units.tensor(s.name), lambda tensor, power: s.scale_(tensor, safe**power))


@dataclass(frozen=True)
class Chain:
    """Couplings that can be balanced against each other."""

    couplings: tuple[UnitGroup, ...]
    between: tuple[tuple[Slice, ...], ...]
    """For each coupling but the last, the biases between its ``out`` and the next coupling's ``out``."""


def find_links(
    units: Units,
    coupled: Callable[[UnitGroup], bool] = lambda group: True,
    free: Callable[[Slice], bool] = lambda s: True,
) -> list[Chain]:
    """The chains over those couplings that are ``coupled``, cut where a bias between them is not ``free`` to scale."""
    penalised = {id(g) for g in units.couplings if coupled(g)}
    found = []
    for run in units.chains:
        couplings: list[UnitGroup] = []
        between: list[tuple[Slice, ...]] = []
        passed: tuple[Slice, ...] = ()
        for group in run:
            passed += group.bias
            if id(group) not in penalised:
                continue
            if couplings and not all(map(free, passed)):
                found.append(Chain(tuple(couplings), tuple(between)))
                couplings, between = [], []
            if couplings:
                between.append(passed)
            couplings.append(group)
            passed = ()
        found.append(Chain(tuple(couplings), tuple(between)))
    return [chain for chain in found if len(chain.couplings) > 1]


def layer_factors(totals: Tensor, limit: float = math.inf) -> tuple[Tensor, Tensor]:
    """For the total path norms of a chain's couplings: what each ``out`` is multiplied by, and the product up to each.

    The product is what the activations behind that coupling have become larger by; it ends at 1, so the function is
    unchanged. A chain with a dead coupling has no balance, and nothing is changed; nor if a factor would exceed
    ``limit``. Totals (couplings, n) are those of n networks, each by itself.
    """
    log = totals.log()
    step = log.mean(0) - log
    sound = step.isfinite().all(0) & (step.abs().amax(0) <= math.log(limit))
    step = torch.where(sound, step, 0)
    return step.exp(), step.cumsum(0).exp()


def balance_chain_(units: Units, chain: Chain, optimizer: Optimizer | None, limit: float = math.inf) -> None:
    totals = torch.stack([(units.norm(g.into) * units.norm(g.out)).sum() for g in chain.couplings])
    factors, behind = layer_factors(totals, limit)
    if bool(((factors - 1).abs() < BALANCED).all()):
        return
    for group, factor in zip(chain.couplings, factors, strict=True):
        for s in group.out:
            scale_(units, s, factor.expand(s.units), optimizer)
    for biases, factor in zip(chain.between, behind, strict=False):
        for s in biases:
            scale_(units, s, factor.expand(s.units), optimizer)
