"""The ways of training that are compared, by the names that recipes have for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import pathprox
from pathprox.balance import scale_
from pathprox.coupling import Coupling
from pathprox.prox import normalize_factor


@dataclass(frozen=True)
class Method:
    """A way of training that the paper compares."""

    title: str
    make: Callable[[pathprox.Units, float], pathprox.Regularizer]


class _DividingBiases(pathprox.PathProx):
    """The projection of the authors' code: whenever w is divided by |w|, so is the bias beside it.

    That penalises the bias, so that the fixed points are not the stationary points of G.
    """

    def __init__(self, units: pathprox.Units, weight_decay: float) -> None:
        super().__init__(units, weight_decay)
        self._fast.on = False  # it leaves biases alone

    def _project_w_(self, c: Coupling) -> None:
        super()._project_w_(c)
        for s in c.group.bias:
            self._scale_(s, normalize_factor(c.w_norm))


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
    "pathprox": Method("PathProx", pathprox.PathProx),
    "pathprox-unbalanced": Method("PathProx without layer balance", partial(pathprox.PathProx, balance=False)),
    "pathprox-divided": Method("PathProx, start divided by |w|", _divided),
    "pathprox-authors": Method("PathProx, start and biases divided by |w|", partial(_divided, kind=_DividingBiases)),
    "pathprox-gauge": Method("PathProx, gauge 4", partial(pathprox.PathProx, gauge=4.0)),
    "normalized": Method("weight decay, normalised w", pathprox.NormalizedWeightDecay),
    "path-norm": Method("SGD on the path norm", pathprox.PathNorm),
    "lasso": Method("lasso", pathprox.Lasso),
    "group-lasso": Method("group lasso", pathprox.GroupLasso),
}
