"""One training step of a `Stack`: what the regularisers of pathprox do around SGD, for chains of linear layers alone,
written out once more for all networks together and tested to agree with them.

Almost all of a step's time goes into reading and writing the stacked weights. So the gradient is worked out here,
layer by layer, and added to the weights as the product that it is; what multiplies them afterwards is brought together
first. Nothing waits for the device, and what lasts is written in place: a step can be recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pathprox.balance import layer_factors
from pathprox.experiments.stack import Pairs, Stack, rows
from pathprox.held import BALANCE_LIMIT
from pathprox.prox import normalize_factor, shrink_factor

NO_DECAY = 1e-12
"""Stands for a weight decay of zero, where it is divided by: next to a gradient it vanishes in rounding."""


class Mask:
    """Keeps units dead: one whose w or v is zero after a step has v = 0 from then on (Task 5)."""

    def __init__(self, stack: Stack, pairs: Pairs) -> None:
        self.pairs = pairs
        self.alive = [torch.ones_like(stack.weights[b][:, 0], dtype=torch.bool) for _, b in pairs]

    def hold_(self, stack: Stack) -> None:
        for pair, alive in zip(self.pairs, self.alive, strict=True):
            alive &= stack.alive(pair)
            stack.weights[pair[1]].mul_(alive.unsqueeze(1))


Pull = Callable[[Stack], list[Tensor]]


def _group_lasso(stack: Stack) -> list[Tensor]:
    return [_inverse(rows(weight)).unsqueeze(2) for weight in stack.weights]


def _path_norm(stack: Stack) -> list[Tensor]:
    found = [torch.ones_like(weight[:, :1, :1]) for weight in stack.weights]
    for (a, b), (w, v) in zip(stack.plan.pairs, stack.norms(), strict=True):
        found[a], found[b] = (v * _inverse(w)).unsqueeze(2), (w * _inverse(v)).unsqueeze(1)
    return found


def _inverse(norm: Tensor) -> Tensor:
    return torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)


PULLS: dict[str, Pull] = {"group-lasso": _group_lasso, "path-norm": _path_norm}
"""Penalties whose gradient, for lambda = 1, is the weight times one number for each row or column."""
DECAYS = ("weight-decay", "normalized")
PROXIMAL = {"pathprox": True, "pathprox-divided": True, "pathprox-unbalanced": False}
"""They act after the step; whether they balance the layers."""
KNOWN = {*PULLS, *DECAYS, *PROXIMAL, "lasso"}


@torch.no_grad()
def step_(
    stack: Stack, x: Tensor, y: Tensor, method: str, lr: Tensor, weight_decay: Tensor, mask: Mask | None = None
) -> None:
    """One step of SGD for every network with its own learning rate and weight decay, (n,)."""
    rate = lr * weight_decay
    if method in DECAYS:
        _decay_step_(stack, x, y, lr, weight_decay.clamp_min(NO_DECAY))
    elif method in PROXIMAL:
        _descend_(stack, x, y, -lr, lambda i, slope, h: stack.weights[i].baddbmm_(slope.mT, h))
    else:
        _penalty_step_(stack, x, y, method, lr, rate.view(-1, 1, 1))
    if method == "normalized":
        for a, _ in stack.plan.pairs:
            stack.weights[a].mul_(normalize_factor(rows(stack.weights[a])).unsqueeze(2))
    if method in PROXIMAL:
        prox_(stack, rate, PROXIMAL[method], mask)
    elif mask is not None:
        mask.hold_(stack)


Update = Callable[[int, Tensor, Tensor], object]
"""Given a layer's number, the loss's slope at its outputs, and its inputs."""


def _descend_(stack: Stack, x: Tensor, y: Tensor, scale: Tensor, update: Update, bias: Tensor | None = None) -> None:
    """Go back through the layers with the slope of ``scale`` times the mean cross entropy.

    ``update`` changes the weights of a layer, whose gradient is ``slope.mT @ h``. The biases' is added here, times
    ``bias``.
    """
    *inputs, logits = stack.layers(x)
    classes = torch.arange(logits.shape[2], device=logits.device)
    slope = logits.softmax(2).sub_((y.unsqueeze(2) == classes).to(logits))
    slope.mul_((scale / y.shape[1]).view(-1, 1, 1))
    for i, h in reversed(list(enumerate(inputs))):
        below = torch.bmm(slope, stack.weights[i]) if i else slope  # by the weights as they were
        update(i, slope, h)
        step = slope.sum(1)
        stack.biases[i].add_(step if bias is None else step * bias.unsqueeze(1))
        if i and stack.bends(i - 1):
            below = torch.ops.aten.threshold_backward(below, h, 0)
        slope = below


def _decay_step_(stack: Stack, x: Tensor, y: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
    """w - lr (gradient + weight_decay w) as one operation: the way from w to -gradient / weight_decay, a part of it.

    To multiply w by 1 - lr weight_decay would lose what is left of a small weight decay when 1 is taken.
    """
    rate = lr * weight_decay

    def update_(i: int, slope: Tensor, h: Tensor) -> None:
        stack.weights[i].lerp_(torch.bmm(slope.mT, h), rate.view(-1, 1, 1))

    _descend_(stack, x, y, -1 / weight_decay, update_, bias=rate)


def _penalty_step_(stack: Stack, x: Tensor, y: Tensor, method: str, lr: Tensor, rate: Tensor) -> None:
    """Lasso, or a penalty that pulls at w itself."""
    pulls = PULLS[method](stack) if method in PULLS else None  # before any weight is changed

    def update_(i: int, slope: Tensor, h: Tensor) -> None:
        weight, change = stack.weights[i], torch.bmm(slope.mT, h)
        if pulls is None:
            change.addcmul_(weight.sign(), rate, value=-1)
        else:
            change.addcmul_(weight, pulls[i] * rate, value=-1)
        weight.add_(change)

    _descend_(stack, x, y, -lr, update_)


def prox_(stack: Stack, threshold: Tensor, balance: bool, mask: Mask | None = None) -> None:
    """Algorithm 1 after the gradient step: project w, threshold v, decay the others, balance the layers.

    Then the mask: where it is about the couplings it is one more factor of v.
    """
    norms = stack.norms()
    shrink = [shrink_factor(v, threshold.unsqueeze(1)) for _, v in norms]
    totals = torch.stack([(v * s).sum(1) for (_, v), s in zip(norms, shrink, strict=True)])
    due = behind = torch.ones_like(totals)
    if balance:
        due, behind = (factors.to(totals) for factors in layer_factors(totals.double(), BALANCE_LIMIT))
    inside = mask is not None and mask.pairs == stack.plan.pairs
    for i, (a, b) in enumerate(stack.plan.pairs):
        w, factor = norms[i][0], shrink[i] * due[i].unsqueeze(1)
        if mask is not None and inside:
            mask.alive[i] &= (w > 0) & (shrink[i] > 0)
            factor = factor * mask.alive[i]
        stack.weights[a].mul_((normalize_factor(w) + (w - w)).unsqueeze(2))  # a norm that is not finite stays so
        stack.weights[b].mul_(factor.unsqueeze(1))
    for biases, factor in zip(stack.plan.between, behind, strict=False):
        for j in biases:
            stack.biases[j].mul_(factor.unsqueeze(1))
    for j in stack.plan.others:
        stack.weights[j].div_((1 + threshold).view(-1, 1, 1))
    if mask is not None and not inside:
        mask.hold_(stack)
        fold_(stack)


def fold_(stack: Stack) -> None:
    """Bring every w to norm 1 and pay with v, the function staying: where the mask has shortened w by what it read."""
    for a, b in stack.plan.pairs:
        factor = normalize_factor(rows(stack.weights[a]))
        stack.weights[a].mul_(factor.unsqueeze(2))
        stack.biases[a].mul_(factor)
        stack.weights[b].div_(factor.unsqueeze(1))
