"""Many MLPs of one shape as one program: every tensor has a leading dimension, one entry for each network.

The networks do not see each other, so one that diverges disturbs no other. What a training step does to them is in
`pathprox.experiments.stack_step`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.balance import find_links
from pathprox.experiments.batches import Fixed
from pathprox.experiments.models import MLP

Pairs = tuple[tuple[int, int], ...]
"""Hidden layers, by the numbers of the linear layers that hold their units' w and v."""


@dataclass(frozen=True)
class Plan:
    """Which layers are coupled, by their numbers."""

    pairs: Pairs
    """The layers that hold w and v of each coupling."""
    others: tuple[int, ...]
    between: tuple[tuple[int, ...], ...]
    """For each coupling but the last, the layers whose biases are scaled when it is balanced against the next."""

    @classmethod
    def of(cls, units: pathprox.Units) -> Plan:
        def layer(name: str) -> int:
            return int(name.split(".")[1])

        pairs = tuple((layer(g.into[0].name), layer(g.out[0].name)) for g in units.couplings)
        chains = find_links(units)
        between = chains[0].between if chains else ()
        return cls(
            pairs,
            tuple(layer(s.name) for s in units.others()),
            tuple(tuple(layer(s.name) for s in biases) for biases in between),
        )


class Stack:
    """The networks' weights (n, out, in) and biases (n, out), and what can be asked of them.

    Narrower networks among them are filled up with units whose w, bias and v are zero. Such a unit says nothing, no
    gradient reaches it, and every method leaves its zeros as they are.
    """

    def __init__(self, models: Sequence[MLP], plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._factorized = models[0].factorized
        layers = list(zip(*(model.layers for model in models), strict=True))
        self.weights = [_stacked([layer.weight for layer in same], device) for same in layers]
        self.biases = [_stacked([layer.bias for layer in same], device) for same in layers]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def __len__(self) -> int:
        return len(self.weights[0])

    @property
    def hidden(self) -> Pairs:
        """All hidden layers."""
        return tuple((i, i + 1) for i in range(len(self.weights) - 1))

    def bends(self, i: int) -> bool:
        """Whether ReLU follows layer i."""
        return i < len(self.weights) - 1 and not (self._factorized and i % 2 == 1)

    def layers(self, x: Tensor) -> Iterator[Tensor]:
        """What each layer is given, and the outputs (n, batch, classes), for inputs (n or 1, batch, ...)."""
        h = x.flatten(2).expand(len(self), -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            yield h
            h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
            if self.bends(i):
                h = h.relu_()
        yield h

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (n, batch, classes) for inputs (n or 1, batch, ...)."""
        for h in self.layers(x):
            last = h
        return last

    def holding(self, parameters: Sequence[Tensor]) -> Stack:
        """The same networks with other weights and biases."""
        other = copy.copy(self)
        count = len(self.weights)
        other.weights, other.biases = list(parameters[:count]), list(parameters[count:])
        return other

    def state(self, i: int) -> dict[str, Tensor]:
        """The state dict of one network."""
        named = {f"layers.{j}.weight": w[i] for j, w in enumerate(self.weights)}
        return named | {f"layers.{j}.bias": b[i] for j, b in enumerate(self.biases)}

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of each network; labels (n or 1, batch)."""
        logits = self(x)
        labels = y.expand(len(logits), -1)
        each = cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none")
        return each.view(labels.shape).mean(1)

    def right(self, x: Tensor, y: Tensor) -> Tensor:
        """How many images each network classifies as they are labelled."""
        return (self(x).argmax(2) == y).sum(1)

    def norms(self) -> list[tuple[Tensor, Tensor]]:
        """|w| and |v| of every unit of each coupling, (n, units)."""
        return [(rows(self.weights[a]), columns(self.weights[b])) for a, b in self.plan.pairs]

    def alive(self, pair: tuple[int, int]) -> Tensor:
        """Which units of a hidden layer have neither w nor v zero, (n, units). By the largest entries: a sum of
        squares may vanish where they do not."""
        into, out = self.weights[pair[0]], self.weights[pair[1]]
        w, v = (torch.linalg.vector_norm(x, torch.inf, dim=d) for x, d in ((into, 2), (out, 1)))
        return (w > 0) & (v > 0)


def _stacked(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """As one tensor of the largest size, zero beyond the end of the smaller ones."""
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    found = torch.zeros(len(tensors), *shape, dtype=tensors[0].dtype, device=device)
    for place, tensor in zip(found, tensors, strict=True):
        place[tuple(map(slice, tensor.shape))] = tensor.detach()
    return found


def rows(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=2)


def columns(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=1)


# What is seen of the networks.


def mean_losses(stack: Stack, images: Fixed) -> Tensor:
    parts = [stack.losses(x[None], y[None]).double() * len(y) for x, y in images.parts()]
    return torch.stack(parts).sum(0) / len(images)


def accuracies(stack: Stack, images: Fixed) -> Tensor:
    """In percent."""
    right = torch.stack([stack.right(x[None], y[None]) for x, y in images.parts()])
    return 100 * right.sum(0).double() / len(images)


def active(stack: Stack, pairs: Pairs) -> Tensor:
    """The share of units in these hidden layers that are not zero, in percent."""
    return 100 * torch.cat([stack.alive(pair) for pair in pairs], 1).double().mean(1)


def squares(stack: Stack) -> Tensor:
    """The sum of squared weights of each network."""
    return torch.stack([_square_sum(w) for w in stack.weights]).sum(0)


def path_norms(stack: Stack) -> Tensor:
    """The sum of path norms and half the squares of the other weights."""
    paths = torch.stack([(w.double() * v.double()).sum(1) for w, v in stack.norms()]).sum(0)
    return paths + sum((_square_sum(stack.weights[j]) / 2 for j in stack.plan.others), start=0)


def _square_sum(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=(1, 2), dtype=torch.float64).square()


def smallest_squares(stack: Stack, rounds: int = 200, tolerance: float = 1e-7) -> Tensor:
    """The least sum of squares over all rescalings of each network.

    As `pathprox.smallest` does it, unit by unit and then layer by layer; in a chain the second has a closed form: the
    layers' sums become equal. A rescaling multiplies the squares of a layer by one factor a row and one a column, so
    only these change from round to round.
    """
    scaled = [_Scaled(w) for w in stack.weights]
    sums = torch.stack([s.energy.sum((1, 2)) for s in scaled])
    for _ in range(rounds if len(scaled) > 1 else 0):
        moved = torch.zeros((), dtype=torch.float64, device=sums.device)
        found = []
        for before, after in pairwise(scaled):
            into, out = before.by_row(), after.by_column()
            alive = (into > 0) & (out > 0)
            factor = torch.where(alive, (out / torch.where(alive, into, 1)).sqrt(), 0)
            inverse = torch.where(alive, 1 / torch.where(alive, factor, 1), 0)
            logs = torch.where(alive & factor.isfinite(), factor, 1).log().abs()
            died = ~alive & (before.row > 0)  # others may die with it
            moved = torch.maximum(moved, torch.where(died, torch.inf, logs).max())
            before.row *= factor
            after.column *= inverse
            found.append((into * factor).sum(1))
        sums = torch.stack([*found, (out * inverse).sum(1)])
        if float(moved) < 2 * tolerance:
            break
        scale = (sums.log().mean(0) - sums.log()).exp()
        for s, factor in zip(scaled, torch.where(scale.isfinite(), scale, 1), strict=True):
            s.row *= factor.unsqueeze(1)
    return sums.sum(0)


class _Scaled:
    """A layer's squared weights, and what their rows and columns are multiplied by."""

    def __init__(self, weight: Tensor) -> None:
        self.energy = weight.to(torch.float64, copy=True).square_()
        self.row = self.energy.new_ones(self.energy.shape[:2])
        self.column = self.energy.new_ones(self.energy.shape[::2])

    def by_row(self) -> Tensor:
        return self.row * torch.bmm(self.energy, self.column.unsqueeze(2)).squeeze(2)

    def by_column(self) -> Tensor:
        return self.column * torch.bmm(self.row.unsqueeze(1), self.energy).squeeze(1)
