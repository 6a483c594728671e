"""PathProx: Algorithm 1 of the paper, after each step of any torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pathprox.balance import layer_factors, scale_state_
from pathprox.coupling import Coupling, Plan, common
from pathprox.fused import capturing
from pathprox.held import BALANCE_LIMIT, REGAUGE, HeldUnits
from pathprox.prox import metric_soft_threshold, normalize_factor, shrink_factor
from pathprox.slices import Slice

LARGEST = 10.0
"""In a metric, a weight without a gradient has an enormous step size. The penalty moves it at most so many times as far
as the optimizer would move a weight with a gradient. At a stationary point this bound is not met."""


class PathProx(HeldUnits):
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
        bias: count the biases beside w as part of w. By default biases are not penalised. Layers with such biases are
            not balanced against each other: scaling one would change what is penalised in the next.
        decoupled: threshold by ``lr * weight_decay`` whatever the optimizer's metric, as AdamW decays. The default for
            AdamW (and for others with ``decoupled_weight_decay=True``) only. That solves another problem than G, one
            that depends on the optimizer's second moments. False gives AdamW the metric step of Adam.
        gauge: hold each w at max(1, sqrt(gauge * |w| |v|)), chosen anew every 20 steps without changing the function.
            0, the paper's choice, holds it at 1. A step takes lr * weight_decay * |w|^2 from a unit's path norm; with
            |w| = 1 that is less than weight decay takes from strong units (|w| |v| above 1/2; those of VGG19 start
            with 2), with ``gauge=4`` twice as much. Strong units then need a lower learning rate. With CUDA graphs see
            `regauge`.
        shrink_every: after every so many steps remove the units that have been dead in each of the last ``patience``
            steps, from the model, the optimizer and ``units``, with `shrink_`. Steps get faster as units die, on a GPU
            not always (see docs/speed.md). A unit that is removed cannot come back. Not with DDP, whose buckets have
            fixed sizes. With CUDA graphs see `remove_settled`.
        patience: see ``shrink_every``.
        multiple_of: with ``shrink_every``, leave a multiple of so many units in each group; 8 on a GPU, see `shrink`.

    Frozen parameters are never changed. A unit with frozen w is penalised with its |w| as a constant; one with frozen v
    is left out, and its w gets ordinary weight decay. A w that is frozen in part, or whose bias is, cannot be held at 1
    and is decayed as |w| |v| asks.

    Units that are not homogeneous (``find_units(..., homogeneous_only=False)``) have weight_decay * |v| as their
    penalty: v is soft-thresholded, and w gets ordinary weight decay.
    """

    # Algorithm 1.

    def _after_step_(self, ok: Tensor | None) -> None:
        self._ok = None
        plan = self._fast.taken or self._make_plan()
        if not self._fast.step_(self, plan, ok):
            self._measure(plan, ok)
            self._proximal_step_(plan)
            self._balance_(plan)
        self._count_asleep(plan)

    def _proximal_step_(self, plan: Plan) -> None:
        for c in plan.couplings:
            self._threshold_v_(c)
            self._project_w_(c)
        for s in plan.others:
            self._decay_(s, torch.ones(1, device=self._parameter(s).device))

    def _threshold_v_(self, c: Coupling) -> None:
        """v <- (1 - step * weight_decay * |w| / |v|)_+ v, or the same in the optimizer's metric.

        Where that is one factor a unit it is only noted, since the balance multiplies v anyway.
        """
        c.v_factor = torch.ones_like(c.v_norm)
        if not all(map(self._steps_now, c.group.out)):
            return
        steps = [self._step(s) for s in c.group.out]
        weight = self.weight_decay * c.w_gauge
        step = common(steps)
        if step is not None:
            c.v_factor = shrink_factor(c.v_norm, step * weight)
            c.v_norm = c.v_norm * c.v_factor
            return
        weights = [self._parameter(s).detach() for s in c.group.out]
        u = torch.cat([s.gather(x) for s, x in zip(c.group.out, weights, strict=True)], 1)
        pull = (weight / torch.where(c.v_norm > 0, c.v_norm, 1)).to(u)
        sizes = [
            s.gather(torch.ones_like(s.view(x)) * self._bounded(s, step, s.view(x) * s.expand(pull)))
            for s, step, x in zip(c.group.out, steps, weights, strict=True)
        ]
        v = metric_soft_threshold(u, torch.cat(sizes, 1), weight.to(u))
        v = v if self._ok is None else torch.where(self._ok, v, u)
        for s, x, rows in zip(c.group.out, weights, v.split([size.shape[1] for size in sizes], 1), strict=True):
            s.write_(x, rows)
        c.v_norm = torch.linalg.vector_norm(v, dim=1).to(c.v_norm)

    def _project_w_(self, c: Coupling) -> None:
        """w <- w / |w|.

        In a metric, w is first decayed as the penalty |w| |v| asks. Along w this changes nothing, but without it the
        projection would stop at points that are not stationary. A w that cannot be projected is only decayed.
        """
        moved = [s for s in c.into if self._steps_now(s)]
        if not moved or not c.group.homogeneous:
            return
        norm = c.w_norm
        small = torch.zeros_like(norm, dtype=torch.bool) if c.gauge is None else torch.eq(c.gauge, 0)
        if not c.held or common([self._step(s) for s in moved]) is None:
            for s in moved:
                self._decay_(s, c.v_norm / torch.where(c.w_gauge > 0, c.w_gauge, 1))
            norm = self.units.norm(c.into)
        elif c.waiting:
            for s in moved:
                self._decay_(s, torch.where(small, c.v_norm / torch.where(norm > 0, norm, 1), 0))
        if c.held:
            factor = torch.where(small, 1, normalize_factor(norm, c.w_gauge))
            for s in c.into:
                self._scale_(s, factor)
        else:
            c.w_gauge = norm

    def _decay_(self, s: Slice, pull: Tensor) -> None:
        """x <- x / (1 + step * weight_decay * pull): the proximal step of weight_decay * pull / 2 * |x|^2."""
        if not self._steps_now(s):
            return
        x = s.view(self._parameter(s).detach())
        rate = s.expand(self.weight_decay * pull.to(x), fill=0)
        step = self._step(s)
        if isinstance(step, Tensor) and step.dim():
            step = self._bounded(s, step, x * rate)
        x.mul_(self._gated(1 / (1 + step * rate)))

    def _bounded(self, s: Slice, step: Tensor | float, penalty: Tensor) -> Tensor | float:
        """The step sizes in the slice's view, so that no weight goes further than `LARGEST` times the optimizer's way.

        ``penalty`` is the penalty's gradient. At a stationary point it is as large as the loss's, by which the
        optimizer has scaled its step, so there the bound does not act; it does where a weight has had no gradient.
        """
        if not isinstance(step, Tensor) or not step.dim():
            return step
        options = self._trained[id(self._parameter(s))]
        largest = None if self._is_decoupled(options) else self._rule.largest(options)
        if largest is None:
            return s.view(step)
        return torch.minimum(s.view(step), torch.where(penalty == 0, torch.inf, LARGEST * largest / penalty.abs()))

    def _balance_(self, plan: Plan) -> None:
        """Give all couplings of a chain the same total path norm; v takes this factor and its threshold's at once."""
        of = {id(c.group): c for c in plan.couplings}
        factors = {id(c): torch.ones_like(c.v_norm[:1]) for c in plan.couplings}
        for chain in plan.chains:
            members = [of[id(group)] for group in chain.couplings]
            totals = torch.stack([(c.w_gauge * c.v_norm).sum() for c in members])
            due, behind = layer_factors(totals, BALANCE_LIMIT)
            factors |= dict(zip(map(id, members), due, strict=True))
            for biases, factor in zip(chain.between, behind, strict=False):
                for s in biases:
                    self._scale_(s, factor.expand(s.units), carry=True)
        for c in plan.couplings:
            for s in c.group.out:
                layer = self._gated(factors[id(c)]).expand(s.units)
                self._scale_(s, layer * c.v_factor)
                if plan.chains:
                    scale_state_(self.units, s, layer, self.optimizer)

    def _measure(self, plan: Plan, ok: Tensor | None) -> None:
        """The norms after the optimizer's step. If one is not finite the step goes no further."""
        for c in plan.couplings:
            if c.held and c.waiting:
                self._wake_(c)
            c.w_norm, c.v_norm = self.units.norm(c.into), self.units.norm(c.group.out)
            c.w_gauge = c.w_norm if c.group.homogeneous else torch.ones_like(c.w_norm)
            if c.held and c.gauge is not None:
                c.w_gauge = torch.where(torch.eq(c.gauge, 0), c.w_norm, c.gauge.to(c.w_norm))
        self._ok = self._guard.weights({c.group.name: (c.w_norm, c.v_norm) for c in plan.couplings}, ok)

    # What the algorithm stands on.

    def _takes_over(self) -> bool:
        if not self._fast.may_take_over(self):
            return False
        if any(c.gauge is not None and c.versions != self._versions(c) for c in self._couplings):
            return False
        return self._fast.take_over(self, self._make_plan())

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._fast.taken is not None:
            with torch.no_grad():
                self._after_step_(None)
        else:
            super()._after(optimizer, args, kwargs)
        if not capturing():
            if self.shrink_every is not None and self._steps % self.shrink_every == 0:
                self.remove_settled()
            if self.gauge and self._steps % REGAUGE == 0:
                self.regauge()
        self._remember()
