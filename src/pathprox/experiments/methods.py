"""The ways of training that are compared, by the names that recipes have for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import pathprox
from pathprox.balance import scale_
from pathprox.coupling import Coupling
from pathprox.prox import normalize_factor


@dataclass(frozen=True)
class Method:
    """A way of training that the paper compares."""

    title: str
    make: Callable[[pathprox.Units, float], pathprox.Regularizer]


class _GeneralWay(pathprox.PathProx):
    """A variation of the algorithm. The fast path knows Algorithm 1 alone."""

    def __init__(self, units: pathprox.Units, weight_decay: float) -> None:
        super().__init__(units, weight_decay)
        self._fast.on = False


class _DividingBiases(_GeneralWay):
    """The projection of the authors' code: whenever w is divided by |w|, so is the bias beside it.

    That penalises the bias, so that the fixed points are not the stationary points of G.
    """

    def _project_w_(self, c: Coupling) -> None:
        super()._project_w_(c)
        for s in c.group.bias:
            self._scale_(s, normalize_factor(c.w_norm))


class _BalancingFirst(_GeneralWay):
    """The order of the authors' code: the layers are balanced first, then comes the proximal step."""

    def _after_step_(self, ok: Tensor | None) -> None:
        plan = self._make_plan()
        self._measure(plan, ok)
        held = [c.w_gauge for c in plan.couplings]
        for c in plan.couplings:
            c.w_gauge, c.v_factor = c.w_norm, torch.ones_like(c.v_norm)
        self._balance_(plan)
        for c, gauge in zip(plan.couplings, held, strict=True):
            c.w_gauge, c.v_norm = gauge, self.units.norm(c.group.out)
        self._proximal_step_(plan)
        self._balance_(replace(plan, chains=[]))  # only what the threshold has left for it


class _AsTheAuthors(_DividingBiases, _BalancingFirst):
    """Both."""


class _DecayingBiases(pathprox.WeightDecay):
    """What the weight_decay of torch's optimizers does: it penalises biases as well."""

    def _add_gradient_(self) -> None:
        super()._add_gradient_()
        penalised = {id(self._parameter(s)) for s, _ in self._weights()}
        for p in self.units.model.parameters():
            if id(p) not in penalised and p.grad is not None:
                p.grad.add_(p.detach(), alpha=self.weight_decay)


def _divided(
    units: pathprox.Units, weight_decay: float, kind: type[pathprox.PathProx] = pathprox.PathProx
) -> pathprox.PathProx:
    """The start of the authors' code: w and the bias beside it divided by |w|, and nothing put into v for it."""
    with torch.no_grad():
        for group in units.couplings:
            factor = normalize_factor(units.norm(group.into))
            for s in (*group.into, *group.bias):
                scale_(units, s, factor)
    return kind(units, weight_decay)


METHODS: dict[str, Method] = {
    "weight-decay": Method("weight decay", pathprox.WeightDecay),
    "weight-decay-biases": Method("weight decay, biases too", _DecayingBiases),
    "pathprox": Method("PathProx", pathprox.PathProx),
    "pathprox-unbalanced": Method("PathProx without layer balance", partial(pathprox.PathProx, balance=False)),
    "pathprox-divided": Method("PathProx, start divided by |w|", _divided),
    "pathprox-before": Method("PathProx, balance before threshold", _BalancingFirst),
    "pathprox-biases": Method("PathProx, start and biases divided by |w|", partial(_divided, kind=_DividingBiases)),
    "pathprox-authors": Method("PathProx as in the authors' code", partial(_divided, kind=_AsTheAuthors)),
    "pathprox-gauge": Method("PathProx, gauge 4", partial(pathprox.PathProx, gauge=4.0)),
    "normalized": Method("weight decay, normalised w", pathprox.NormalizedWeightDecay),
    "path-norm": Method("SGD on the path norm", pathprox.PathNorm),
    "lasso": Method("lasso", pathprox.Lasso),
    "group-lasso": Method("group lasso", pathprox.GroupLasso),
}
