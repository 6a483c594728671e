"""PathProx: Algorithm 1 of the paper, after each step of any torch optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathprox.balance import Chain, find_links, layer_factors, scale_, scale_state_
from pathprox.prox import metric_soft_threshold, normalize_factor, shrink_factor
from pathprox.regularizer import Regularizer
from pathprox.slices import Slice
from pathprox.units import UnitGroup, Units

HELD = 1e-6
"""A norm this close to its gauge counts as there: attaching to a network that was trained so changes no bit of it."""
BIAS_PASSES = 5
"""With biases inside w, balancing the layers moves w off its sphere: so many passes of both settle it."""


class PathProx(Regularizer):
    """Weight decay that ends with a smaller network.

    After each step of the optimizer it projects every unit's input weights w to the unit sphere, soft-thresholds its
    output weights v (so that units become exactly zero), decays the other weights, and balances the layers. It
    minimises the path-norm objective G, whose minimisers are those of the weight-decay objective F with the same
    ``weight_decay``. Its fixed points are the stationary points of G for every optimizer in
    `pathprox.stepsize.RULES`: momentum and adaptive steps are accounted for.

    When attached it folds |w| into v, so the network starts as the same function.

    Args:
        units: from `find_units`; ``units.couplings`` are penalised.
        weight_decay: lambda. The optimizer's own weight_decay must be 0.
        balance: balance the layers after each step (the paper's default).
        bias: count the biases beside w as part of w. By default biases are not penalised.
        decoupled: threshold by ``lr * weight_decay`` whatever the optimizer's metric, as AdamW decays. The default for
            AdamW (and for others with ``decoupled_weight_decay=True``) only. That solves another problem than G, one
            that depends on the optimizer's second moments. False gives AdamW the metric step of Adam.

    Frozen parameters are never changed. A unit with frozen w is penalised with its |w| as a constant, one with frozen
    v not at all.
    """

    def __init__(
        self,
        units: Units,
        weight_decay: float,
        balance: bool = True,
        bias: bool = False,
        *,
        decoupled: bool | None = None,
    ) -> None:
        super().__init__(units, weight_decay, decoupled=decoupled)
        if not units.couplings:
            raise ValueError(f"the model has no homogeneous units to penalise.\n{units}")
        self.balance = balance
        self.bias = bias
        self._couplings = [_Coupling(group, group.into + (group.bias if bias else ())) for group in units.couplings]
        self._plan: _Plan | None = None
        self._ok: Tensor | None = None

    # Algorithm 1.

    def _after_step_(self, ok: Tensor | None) -> None:
        plan = self._make_plan()
        self._measure(plan, ok)
        for c in plan.couplings:
            self._threshold_v_(c)
            self._project_w_(c)
        for s in plan.others:
            self._decay_(s, torch.ones(1, device=self._parameter(s).device))
        self._balance_(plan)

    def _threshold_v_(self, c: _Coupling) -> None:
        """v <- (1 - step * weight_decay * |w| / |v|)_+ v, or the same in the optimizer's metric.

        Where that is one factor a unit it is only noted, since the balance multiplies v anyway.
        """
        c.v_factor = torch.ones_like(c.v_norm)
        steps = self._steps(c.group.out)
        if steps is None:
            return
        weight = self.weight_decay * c.w_gauge
        step = _common(steps)
        if step is not None:
            c.v_factor = shrink_factor(c.v_norm, step * weight)
            c.v_norm = c.v_norm * c.v_factor
            return
        weights = [self._parameter(s).detach() for s in c.group.out]
        u = torch.cat([s.gather(x) for s, x in zip(c.group.out, weights, strict=True)], 1)
        sizes = [
            s.gather(torch.as_tensor(step).to(x).expand_as(x))
            for s, step, x in zip(c.group.out, steps, weights, strict=True)
        ]
        v = metric_soft_threshold(u, torch.cat(sizes, 1), weight)
        v = v if self._ok is None else torch.where(self._ok, v, u)
        for s, x, rows in zip(c.group.out, weights, v.split([size.shape[1] for size in sizes], 1), strict=True):
            s.write_(x, rows)
        c.v_norm = torch.linalg.vector_norm(v, dim=1)

    def _project_w_(self, c: _Coupling) -> None:
        """w <- w / |w|.

        In a metric, w is first decayed as the penalty |w| |v| asks. Along w this changes nothing, but without it the
        projection would stop at points that are not stationary. A w that is frozen in part cannot be projected; its
        rest is decayed.
        """
        steps = self._steps(c.into) if c.held else None
        norm = c.w_norm
        if steps is None or _common(steps) is None:
            for s in c.into:
                self._decay_(s, c.v_norm / torch.where(c.w_gauge > 0, c.w_gauge, 1))
            norm = self.units.norm(c.into)
        if steps is not None:
            for s in c.into:
                self._scale_(s, normalize_factor(norm, c.w_gauge))

    def _decay_(self, s: Slice, pull: Tensor) -> None:
        """x <- x / (1 + step * weight_decay * pull): the proximal step of weight_decay * pull / 2 * |x|^2."""
        steps = self._steps([s])
        if steps is None:
            return
        step, x = steps[0], s.view(self._parameter(s).detach())
        if isinstance(step, Tensor) and step.dim():
            step = s.view(step)
        factor = 1 / (1 + step * s.expand(self.weight_decay * pull.to(x), fill=0))
        x.mul_(self._gated(factor))

    def _balance_(self, plan: _Plan) -> None:
        """Give all couplings of a chain the same total path norm; v takes this factor and its threshold's at once."""
        of = {id(c.group): c for c in plan.couplings}
        factors = {id(c): torch.ones_like(c.v_norm[:1]) for c in plan.couplings}
        for chain in plan.chains:
            members = [of[id(group)] for group in chain.couplings]
            totals = torch.stack([(c.w_gauge * c.v_norm).sum() for c in members])
            factors |= dict(zip(map(id, members), self._balance_biases_(chain, totals), strict=True))
        for c in plan.couplings:
            for s in c.group.out:
                layer = self._gated(factors[id(c)]).expand(s.units)
                self._scale_(s, layer * c.v_factor)
                if plan.chains:
                    scale_state_(self.units, s, layer, self.optimizer)
        if self.bias:
            self._settle_(plan)

    def _balance_biases_(self, chain: Chain, totals: Tensor) -> Tensor:
        """Scale a chain's biases as its balance asks; returns the factor that is due to each v."""
        factors, behind = layer_factors(totals)
        for biases, factor in zip(chain.between, behind, strict=False):
            for s in biases:
                self._scale_(s, factor.expand(s.units), carry=True)
        return factors

    def _settle_(self, plan: _Plan) -> None:
        """Balanced biases are part of w here: fold and balance in turn until both hold."""
        of = {id(c.group): c for c in plan.couplings}
        for chain in plan.chains:
            members = [of[id(group)] for group in chain.couplings]
            for _ in range(BIAS_PASSES):
                totals = torch.stack([(c.w_gauge * self.units.norm(c.group.out)).sum() for c in members])
                for c, factor in zip(members, self._balance_biases_(chain, totals), strict=True):
                    for s in c.group.out:
                        self._scale_(s, factor.expand(s.units), carry=True)
                    if c.held:
                        self._fold_(c)

    # What the algorithm stands on.

    def _start_(self) -> None:
        self._make_plan()

    def _add_gradient_(self) -> None:
        pass  # the penalty is not smooth: it acts after the step

    def _make_plan(self) -> _Plan:
        """Which couplings are penalised; made anew when parameters were frozen, thawed or given to the optimizer."""
        self._trained = self._options()
        key = frozenset(self._trained)
        if self._plan is None or self._plan.key != key:

            def free(s: Slice) -> bool:
                return id(self._parameter(s)) in key

            couplings = [c for c in self._couplings if all(map(free, c.group.out))]
            chosen = {id(c.group) for c in couplings}
            chains = find_links(self.units, lambda group: id(group) in chosen, free) if self.balance else []
            self._plan = _Plan(key, couplings, self.units.others([c.group for c in couplings]), chains)
            for c in couplings:
                c.held = all(map(free, c.into))
                self._hold_(c, foldable=all(map(free, c.group.bias)))
        return self._plan

    def _hold_(self, c: _Coupling, foldable: bool) -> None:
        """Choose the norm that w is held at: 1 where |w| can be folded into v, else what it is; 0 for w = 0."""
        if c.held and c.gauge is None:
            norm = self.units.norm(c.into)
            c.gauge = (norm > 0).to(norm) if foldable else norm
            self._fold_(c)

    def _fold_(self, c: _Coupling) -> None:
        """Bring w to its norm and pay with v: the function stays."""
        assert c.gauge is not None
        norm = self.units.norm(c.into)
        factor = normalize_factor(norm, c.gauge.to(norm))
        factor = torch.where((factor - 1).abs() < HELD, 1, factor)
        for s in c.group.into + c.group.bias:
            self._scale_(s, factor, carry=True)
        for s in c.group.out:
            self._scale_(s, 1 / torch.where(c.gauge > 0, factor, 1), carry=True)

    def _measure(self, plan: _Plan, ok: Tensor | None) -> None:
        """The norms after the optimizer's step. If one is not finite the step goes no further."""
        for c in plan.couplings:
            c.w_norm, c.v_norm = self.units.norm(c.into), self.units.norm(c.group.out)
            c.w_gauge = c.gauge.to(c.w_norm) if c.held and c.gauge is not None else c.w_norm
        self._ok = self._guard.weights({c.group.name: (c.w_norm, c.v_norm) for c in plan.couplings}, ok)

    def _steps(self, slices: Sequence[Slice]) -> list[Tensor | float] | None:
        """The step size of each slice's parameter; None if some of them did not take part in this step."""
        parameters = [self._parameter(s) for s in slices]
        if any(p.grad is None or id(p) not in self._trained for p in parameters):
            return None
        return [self._step_size(p, self._trained[id(p)]) for p in parameters]

    def _scale_(self, s: Slice, factor: Tensor, carry: bool = False) -> None:
        """Multiply by one factor a unit; ``carry``: the function stays, so let the optimizer's state follow."""
        scale_(self.units, s, self._gated(factor), self.optimizer if carry else None)

    def _gated(self, factor: Tensor) -> Tensor:
        return factor if self._ok is None else torch.where(self._ok, factor, 1)

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        gauges = {f"{i}: {c.group.name}": c.gauge for i, c in enumerate(self._couplings) if c.gauge is not None}
        return {**super().state_dict(), "gauge": gauges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {f"{i}: {c.group.name}": c for i, c in enumerate(self._couplings)}
        for name, gauge in state.get("gauge", {}).items():
            if name not in names or len(names[name].group) != len(gauge):
                raise ValueError(
                    f"the saved state has {len(gauge)} units in the coupling {name!r}, which this model does not have"
                )
        super().load_state_dict(state)
        for name, gauge in state["gauge"].items():
            names[name].gauge = gauge.clone()


_UNSET = torch.empty(0)


@dataclass(eq=False)
class _Coupling:
    """A group that is penalised, and what is known of it in this step."""

    group: UnitGroup
    into: tuple[Slice, ...]
    """The slices that make up w."""
    gauge: Tensor | None = None
    """The norm that each w is held at; None before it is first penalised."""
    held: bool = False
    """Whether w is free to be projected."""
    w_norm: Tensor = _UNSET
    v_norm: Tensor = _UNSET
    w_gauge: Tensor = _UNSET
    """|w| in the penalty |w| |v|: the gauge, or what the norm is where w is not held."""
    v_factor: Tensor = _UNSET


@dataclass(frozen=True)
class _Plan:
    key: frozenset[int]
    couplings: list[_Coupling]
    others: list[Slice]
    chains: list[Chain]


def _common(steps: Sequence[Tensor | float]) -> Tensor | float | None:
    """The one number that all step sizes are, if they are."""
    first = steps[0]
    if isinstance(first, Tensor):
        return first if first.dim() == 0 and all(step is first for step in steps) else None
    return first if all(not isinstance(step, Tensor) and step == first for step in steps) else None
