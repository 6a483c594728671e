"""The ways of training that are compared, by the names that recipes have for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import pathprox
from pathprox.balance import scale_
from pathprox.prox import normalize_factor


@dataclass(frozen=True)
class Method:
    """A way of training that the paper compares."""

    title: str
    make: Callable[[pathprox.Units, float], pathprox.Regularizer]


def _divided(units: pathprox.Units, weight_decay: float) -> pathprox.PathProx:
    """The start of the authors' code: w and the bias beside it divided by |w|, and nothing put into v for it."""
    with torch.no_grad():
        for group in units.couplings:
            factor = normalize_factor(units.norm(group.into))
            for s in (*group.into, *group.bias):
                scale_(units, s, factor)
    return pathprox.PathProx(units, weight_decay)


METHODS: dict[str, Method] = {
    "weight-decay": Method("weight decay", pathprox.WeightDecay),
    "pathprox": Method("PathProx", pathprox.PathProx),
    "pathprox-unbalanced": Method("PathProx without layer balance", partial(pathprox.PathProx, balance=False)),
    "pathprox-divided": Method("PathProx, start divided by |w|", _divided),
    "pathprox-gauge": Method("PathProx, gauge 4", partial(pathprox.PathProx, gauge=4.0)),
    "normalized": Method("weight decay, normalised w", pathprox.NormalizedWeightDecay),
    "path-norm": Method("SGD on the path norm", pathprox.PathNorm),
    "lasso": Method("lasso", pathprox.Lasso),
    "group-lasso": Method("group lasso", pathprox.GroupLasso),
}
