"""The two objectives of the paper, and how far a point is from being stationary.

    F = loss + weight_decay/2 * sum of squared weights                                     the weight-decay objective
    G = loss + weight_decay * ( sum over units |w| |v| + 1/2 sum of other squared weights )  the path-norm objective

They have the same minimum, and F >= G everywhere. (Units that are not homogeneous, if they were asked for, count in G
with |v| alone, and then this is not so.) F depends on how a function is represented, so methods should be
compared at each one's best representation: ``balanced``, the least F over all rescalings of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathprox.slices import Slice
from pathprox.smallest import smallest_squares
from pathprox.units import UnitGroup, Units


@dataclass(frozen=True)
class Objective:
    """Values of the objectives at one point."""

    loss: float
    weight_decay: float
    """F: loss + weight_decay/2 * squared weights, as they are."""
    path_norm: float
    """G: loss + weight_decay * (path norms + half the squares of the other weights)."""
    unit_balanced: float
    """F once |w| = |v| in every unit of the couplings: equal to G."""
    balanced: float
    """F at its least over all rescalings of the network."""


@torch.no_grad()
def objective(units: Units, loss: float | Tensor, weight_decay: float) -> Objective:
    """Both objectives, for a loss that was evaluated at the model's present weights. The weights are not touched."""
    squares = sum_of_squares(units)
    others = _square_sum(units, units.others())
    path = sum(float(units.path_norm(g).double().sum()) for g in units.couplings)
    value = float(loss)

    def least(groups: Sequence[UnitGroup]) -> float:
        solution = smallest_squares(units, [g for g in groups if g.homogeneous])
        return solution.squares + sum(q for name, q in squares.items() if name not in solution.names)

    return Objective(
        loss=value,
        weight_decay=value + weight_decay / 2 * sum(squares.values()),
        path_norm=value + weight_decay * (path + others / 2),
        unit_balanced=value + weight_decay / 2 * least(units.couplings),
        balanced=value + weight_decay / 2 * least(units.groups),
    )


@torch.no_grad()
def sum_of_squares(units: Units) -> dict[str, float]:
    """The sum of squares of every penalised parameter."""
    return {s.name: _square_sum(units, [s]) for s in units.rows()}


def _square_sum(units: Units, slices: Sequence[Slice]) -> float:
    return float(sum(float(s.square_sum(units.tensor(s.name).detach().double()).sum()) for s in slices))


@torch.no_grad()
def stationarity(units: Units, weight_decay: float, bias: bool = False) -> float:
    """The distance from zero to the subdifferential of G, from the loss gradients now in ``.grad``.

    Zero exactly at the stationary points of G. Call it after ``loss.backward()`` on the full data. ``bias`` says
    whether the biases beside w count as part of it, as in `PathProx`.
    """
    total = 0.0
    taken: dict[str, list[Slice]] = {}

    def add(slices: Sequence[Slice], pull: Tensor, slack: Tensor) -> None:
        nonlocal total
        total += _residual(units, slices, pull, slack)
        for s in slices:
            taken.setdefault(s.name, []).append(s)

    couplings = [g for g in units.couplings if all(units.tensor(s.name).requires_grad for s in g.out)]
    for group in couplings:
        into = group.into + (group.bias if bias else ())
        w, v = units.norm(into), units.norm(group.out)
        if not group.homogeneous:
            add(group.out, weight_decay / torch.where(v > 0, v, 1), torch.where(v > 0, 0, weight_decay))
            continue
        add(into, weight_decay * v / torch.where(w > 0, w, 1), torch.where(w > 0, 0, weight_decay * v))
        add(group.out, weight_decay * w / torch.where(v > 0, v, 1), torch.where(v > 0, 0, weight_decay * w))
    for s in units.others(couplings):
        add([s], torch.full((1,), weight_decay), torch.zeros(1))
    for name, parameter in units.model.named_parameters():
        shape = tuple(parameter.shape) or (1,)
        whole = Slice(name, shape, tuple(range(len(shape))), torch.zeros(parameter.numel()), 1)
        rest = whole.rest(taken.get(name, []))
        if rest is not None:
            total += _residual(units, [rest], torch.zeros(1), torch.zeros(1))
    return float(total**0.5)


def _residual(units: Units, slices: Sequence[Slice], pull: Tensor, slack: Tensor) -> float:
    """Sum over units of max(0, |gradient + pull * weight| - slack)^2; frozen parameters are constants."""
    squares = torch.zeros(len(pull), dtype=torch.float64)
    for s in slices:
        parameter = units.tensor(s.name)
        if parameter.requires_grad:
            there = s.view(parameter.detach()) * s.expand(pull.to(parameter))
            if parameter.grad is not None:
                there = there + s.view(parameter.grad)
            squares += s.square_sum(there.double()).cpu()
    return float((squares.sqrt() - slack.cpu()).clamp_min(0).square().sum())
