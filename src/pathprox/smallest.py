"""The smallest sum of squared weights over all rescalings of the units: the representation weight decay would choose.

The sum is convex in the logarithms of the factors. For one group alone it has a closed form, a^4 = |v|^2 / |w|^2, so
going round the groups leads to the minimum, but slowly where many layers have to agree on their sizes. So after each
round all units of a group are moved together, by a Newton step on one number a group; then a few rounds are enough.

Only squares matter, summed over all entries that scale alike. The weights themselves are not touched. What is left of
them is small, and the search is a long row of small operations: it runs on the CPU wherever the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathprox.slices import Slice
from pathprox.units import UnitGroup, Units


@dataclass(frozen=True)
class Smallest:
    """The smallest sum of squares, and the factors that lead there."""

    groups: tuple[UnitGroup, ...]
    into: list[Tensor]
    """For each group, what its units' ``into`` and ``bias`` are multiplied with, on the CPU; 0 for dead units."""
    out: list[Tensor]
    """The same for ``out``."""
    squares: float
    """Sum of the squared weights, after rescaling, of every parameter that the groups hold weights of."""
    names: frozenset[str]
    """Those parameters."""


@torch.no_grad()
def smallest_squares(units: Units, groups: Sequence[UnitGroup], rounds: int = 200, tolerance: float = 1e-7) -> Smallest:
    """Minimise the sum of squares over all rescalings of ``groups``. Units with w or v = 0 end up weighing nothing."""
    problem = _Problem(units, groups)
    for _ in range(rounds if groups else 0):
        moved = max([problem.move_units(i) for i in range(len(groups))])
        if moved < tolerance:
            break
        if len(groups) > 1:
            problem.move_groups()
    total = float(sum(float(squares.sum()) for squares in problem.squares.values()))
    return Smallest(tuple(groups), problem.into, problem.out, total, frozenset(problem.squares))


class _Problem:
    def __init__(self, units: Units, groups: Sequence[UnitGroup]) -> None:
        self.groups = groups
        slices: dict[str, list[Slice]] = {}
        for group in groups:
            for s in group.weights:
                slices.setdefault(s.name, []).append(s)
        self.squares = {name: _reduced(units.tensor(name).detach(), which) for name, which in slices.items()}
        self.cells = {name: self._cells(name) for name in self.squares}
        self.into = [torch.ones(len(g), dtype=torch.float64) for g in groups]
        self.out = [factor.clone() for factor in self.into]
        self.constant = [_has_bias(units, g) for g in groups]

    def move_units(self, i: int) -> float:
        """The best factor for each unit of a group, all others fixed; returns the largest logarithm."""
        group = self.groups[i]
        w2, v2 = self._total(group.into), self._total(group.out)
        alive = (w2 > 0) & (v2 > 0)
        free = (w2 == 0) & self.constant[i]  # a constant: v goes to zero as its bias grows, which costs nothing
        dead = ~alive & ~free
        power = 0.125 if group.meets_itself else 0.25  # units that scale each other go only half way at once
        factor = torch.where(alive, (v2 / torch.where(alive, w2, 1)) ** power, 1)
        newly = dead & ((self.into[i] != 0) | (self.out[i] != 0))
        self._scale(i, torch.where(dead, 0, factor), torch.where(dead, 0, 1 / factor))
        for s in self.groups[i].out if free.any() else ():
            self.squares[s.name] *= s.expand(torch.where(free, 0.0, 1.0).double())
        return float("inf") if newly.any() else float(factor.log().abs().max())

    def move_groups(self) -> None:
        """One factor for all units of a group: minimise sum over cells (a, b) of K[a, b] exp(2 x_a - 2 x_b)."""
        count = len(self.groups)
        K = torch.zeros((count + 1) ** 2, dtype=torch.float64)
        for name, cells in self.cells.items():
            weights = self.squares[name].expand(cells.shape).flatten()
            K += torch.bincount(cells.flatten(), weights, (count + 1) ** 2)
        for i, x in enumerate(_newton(K.view(count + 1, count + 1)).tolist()):
            factor = torch.full_like(self.into[i], x).exp()
            self._scale(i, factor, 1 / factor)

    def _cells(self, name: str) -> Tensor:
        """For each entry the pair (group that it feeds, group that feeds it) as one number; the last group is none."""
        count = len(self.groups)
        sides = [torch.full((1,), count) for _ in range(2)]
        for i, group in enumerate(self.groups):
            for side, which in enumerate((group.into, group.out)):
                for s in which:
                    if s.name == name:
                        mine = s.expand(torch.ones(s.units), fill=0) > 0
                        sides[side] = torch.where(mine, i, sides[side])
        return (sides[0] * (count + 1) + sides[1]).expand(self.squares[name].shape)

    def _total(self, slices: Sequence[Slice]) -> Tensor:
        return torch.stack([s.total(self.squares[s.name]) for s in slices]).sum(0)

    def _scale(self, i: int, into: Tensor, out: Tensor) -> None:
        self.into[i] *= into
        self.out[i] *= out
        for slices, factor in ((self.groups[i].into, into), (self.groups[i].out, out)):
            for s in slices:
                self.squares[s.name] *= s.expand(factor.square())


def _newton(K: Tensor, steps: int = 20) -> Tensor:
    """argmin_x sum_ab K[a, b] exp(2 x_a - 2 x_b) with the last x held at 0: convex, damped where a step is long."""
    count = len(K) - 1
    x = torch.zeros(count + 1, dtype=K.dtype)
    K = K - K.diag().diag()
    for _ in range(steps):
        terms = K * torch.exp(2 * (x[:, None] - x[None, :]))
        gradient = 2 * (terms.sum(1) - terms.sum(0))
        hessian = 4 * (torch.diag(terms.sum(0) + terms.sum(1)) - terms - terms.T)
        ridge = 1e-12 * hessian.diag().max().clamp_min(1e-300)
        step = torch.linalg.solve(hessian[:count, :count] + ridge * torch.eye(count, dtype=K.dtype), -gradient[:count])
        x[:count] += step * (1 / step.abs().max().clamp_min(1e-300)).clamp_max(1)
        if step.abs().max() < 1e-9:
            break
    return x[:count]


def _reduced(parameter: Tensor, slices: Sequence[Slice]) -> Tensor:
    """The parameter's squares, summed over the dimensions along which no slice tells entries apart."""
    kept = {d for s in slices for d in s.dims}
    view = slices[0].view(parameter).double().square()
    summed = tuple(d for d in range(view.dim()) if d not in kept)
    return (view.sum(summed, keepdim=True) if summed else view).cpu()


def _has_bias(units: Units, group: UnitGroup) -> Tensor:
    """Units that could be a nonzero constant when w is zero."""
    if not group.bias:
        return torch.zeros(len(group), dtype=torch.bool)
    return (units.norm(group.bias) > 0).cpu()
