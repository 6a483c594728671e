"""Many MLPs of one shape as one program: every tensor has a leading dimension, one entry for each network.

The networks do not see each other, so one that diverges disturbs no other. A step does what the regularisers of
pathprox do after SGD, for chains of linear layers alone: written out once more, for all networks together, and tested
to agree with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.balance import find_links, layer_factors
from pathprox.experiments.models import MLP
from pathprox.optim import BALANCE_LIMIT
from pathprox.prox import normalize_factor, shrink_factor


@dataclass(frozen=True)
class Plan:
    """Which layers are coupled, by their numbers."""

    pairs: tuple[tuple[int, int], ...]
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
    """The networks' weights (n, out, in) and biases (n, out), and what can be asked of them."""

    def __init__(self, models: Sequence[MLP], plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._factorized = models[0].factorized

        def stacked(tensors: list[Tensor]) -> nn.Parameter:
            return nn.Parameter(torch.stack([t.detach() for t in tensors]).to(device))

        layers = list(zip(*(model.layers for model in models), strict=True))
        self.weights: list[Tensor] = [stacked([layer.weight for layer in same]) for same in layers]
        self.biases: list[Tensor] = [stacked([layer.bias for layer in same]) for same in layers]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (n, batch, classes) for inputs (n or 1, batch, ...)."""
        h = x.flatten(2).expand(len(self.weights[0]), -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
            if i < len(self.weights) - 1 and not (self._factorized and i % 2):
                h = torch.relu(h)
        return h

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

    @torch.no_grad()
    def right(self, x: Tensor, y: Tensor) -> Tensor:
        """How many images each network classifies as they are labelled."""
        return (self(x).argmax(2) == y).sum(1)

    def norms(self) -> list[tuple[Tensor, Tensor]]:
        """|w| and |v| of every unit of each coupling, (n, units)."""
        return [(_rows(self.weights[a]), _columns(self.weights[b])) for a, b in self.plan.pairs]


def _rows(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight.detach(), dim=2)


def _columns(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight.detach(), dim=1)


Penalty = Callable[[Stack, list[Tensor]], list[Tensor]]


def _squares(stack: Stack, weights: list[Tensor]) -> list[Tensor]:
    return weights


def _lasso(stack: Stack, weights: list[Tensor]) -> list[Tensor]:
    return [w.sign() for w in weights]


def _group_lasso(stack: Stack, weights: list[Tensor]) -> list[Tensor]:
    return [w * _inverse(_rows(w)).unsqueeze(2) for w in weights]


def _path_norm(stack: Stack, weights: list[Tensor]) -> list[Tensor]:
    found = list(weights)
    for (a, b), (w, v) in zip(stack.plan.pairs, stack.norms(), strict=True):
        found[a] = weights[a] * (v * _inverse(w)).unsqueeze(2)
        found[b] = weights[b] * (w * _inverse(v)).unsqueeze(1)
    return found


def _inverse(norm: Tensor) -> Tensor:
    return torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)


PENALTIES: dict[str, Penalty] = {
    "weight-decay": _squares,
    "normalized": _squares,
    "lasso": _lasso,
    "group-lasso": _group_lasso,
    "path-norm": _path_norm,
}
"""The gradient of each penalty for lambda = 1, to be added to the loss's. PathProx has none: it acts after the step."""


def step_(stack: Stack, x: Tensor, y: Tensor, method: str, lr: Tensor, weight_decay: Tensor) -> None:
    """One step of SGD for every network with its own learning rate and weight decay, (n,)."""
    gradients = torch.autograd.grad(stack.losses(x, y).sum(), stack.parameters)
    with torch.no_grad():
        if method in PENALTIES:
            pieces = PENALTIES[method](stack, [w.detach() for w in stack.weights])
            for gradient, piece in zip(gradients, pieces, strict=False):
                gradient.addcmul_(piece, weight_decay.view(-1, 1, 1))
        for parameter, gradient in zip(stack.parameters, gradients, strict=True):
            parameter.addcmul_(gradient, lr.view(-1, *[1] * (gradient.dim() - 1)), value=-1)
        if method == "normalized":
            for a, _ in stack.plan.pairs:
                stack.weights[a].mul_(normalize_factor(_rows(stack.weights[a])).unsqueeze(2))
        elif method in ("pathprox", "pathprox-unbalanced"):
            prox_(stack, lr * weight_decay, balance=method == "pathprox")


def prox_(stack: Stack, threshold: Tensor, balance: bool) -> None:
    """Algorithm 1 after the gradient step: project w, threshold v, decay the others, balance the layers."""
    norms = stack.norms()
    shrink = [shrink_factor(v, threshold.unsqueeze(1)) for _, v in norms]
    totals = torch.stack([(v * s).sum(1) for (_, v), s in zip(norms, shrink, strict=True)])
    due = behind = torch.ones_like(totals)
    if balance:
        due, behind = (factors.to(totals) for factors in layer_factors(totals.double(), BALANCE_LIMIT))
    for i, (a, b) in enumerate(stack.plan.pairs):
        stack.weights[a].mul_(normalize_factor(norms[i][0]).unsqueeze(2))
        stack.weights[b].mul_((shrink[i] * due[i].unsqueeze(1)).unsqueeze(1))
    for biases, factor in zip(stack.plan.between, behind, strict=False):
        for j in biases:
            stack.biases[j].mul_(factor.unsqueeze(1))
    for j in stack.plan.others:
        stack.weights[j].div_((1 + threshold).view(-1, 1, 1))


@torch.no_grad()
def squares(stack: Stack) -> Tensor:
    """The sum of squared weights of each network."""
    return torch.stack([w.double().square().sum((1, 2)) for w in stack.weights]).sum(0)


@torch.no_grad()
def path_norms(stack: Stack) -> Tensor:
    """The sum of path norms and half the squares of the other weights."""
    paths = torch.stack([(w.double() * v.double()).sum(1) for w, v in stack.norms()]).sum(0)
    return paths + sum((stack.weights[j].double().square().sum((1, 2)) / 2 for j in stack.plan.others), start=0)


@torch.no_grad()
def smallest_squares(stack: Stack, rounds: int = 200, tolerance: float = 1e-7) -> Tensor:
    """The least sum of squares over all rescalings of each network.

    As `pathprox.smallest` does it, unit by unit and then layer by layer; in a chain the second has a closed form: the
    layers' sums become equal.
    """
    energy = [w.double().square() for w in stack.weights]
    for _ in range(rounds):
        moved = torch.zeros((), dtype=torch.float64, device=energy[0].device)
        for i in range(1, len(energy)):
            into, out = energy[i - 1].sum(2), energy[i].sum(1)
            alive = (into > 0) & (out > 0)
            factor = torch.where(alive, (out / torch.where(alive, into, 1)).sqrt(), 0)
            energy[i - 1] *= factor.unsqueeze(2)
            energy[i] *= torch.where(alive, 1 / torch.where(alive, factor, 1), 0).unsqueeze(1)
            logs = torch.where(alive & factor.isfinite(), factor, 1).log().abs()
            moved = torch.maximum(moved, logs.max())
        if float(moved) < 2 * tolerance:
            break
        sums = torch.stack([e.sum((1, 2)) for e in energy])
        scale = (sums.log().mean(0) - sums.log()).exp()
        scale = torch.where(scale.isfinite(), scale, 1)
        for e, s in zip(energy, scale, strict=True):
            e *= s.view(-1, 1, 1)
    return torch.stack([e.sum((1, 2)) for e in energy]).sum(0)
