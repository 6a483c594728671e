"""PathProx: Algorithm 1 of the paper, after each step of any torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pathprox.balance import balance_chain_, find_links, layer_factors, rescale_, scale_, scale_state_
from pathprox.coupling import Coupling, Plan, common
from pathprox.dead import checked_multiple, keep_multiple
from pathprox.fast import FastPath
from pathprox.fused import capturing
from pathprox.prox import metric_soft_threshold, normalize_factor, shrink_factor
from pathprox.regularizer import Regularizer
from pathprox.shrink import shrink_
from pathprox.slices import Slice
from pathprox.units import UnitGroup, Units

HELD = 1e-6
"""A norm this close to its gauge counts as there: attaching to a network that was trained so changes no bit of it."""
BALANCE_LIMIT = 10.0
"""A chain is left as it is while a layer would have to be scaled by more than this: balancing one that is nearly dead
blows up the biases behind it, and with them the next steps."""
AWAKE = 0.5
"""A unit that started with w = 0 is held at 1 from this norm on; folding a smaller w would blow up its bias."""
LARGEST = 10.0
"""In a metric, a weight without a gradient has an enormous step size. The penalty moves it at most so many times as far
as the optimizer would move a weight with a gradient. At a stationary point this bound is not met."""


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
        bias: count the biases beside w as part of w. By default biases are not penalised. Layers with such biases are
            not balanced against each other: scaling one would change what is penalised in the next.
        decoupled: threshold by ``lr * weight_decay`` whatever the optimizer's metric, as AdamW decays. The default for
            AdamW (and for others with ``decoupled_weight_decay=True``) only. That solves another problem than G, one
            that depends on the optimizer's second moments. False gives AdamW the metric step of Adam.
        shrink_every: after every so many steps remove the units that have been dead in each of the last ``patience``
            steps, from the model, the optimizer and ``units``, with `shrink_`. Training gets faster as units die. A
            unit that is removed cannot come back. Not with DDP, whose buckets have fixed sizes. With CUDA graphs see
            `remove_settled`.
        patience: see ``shrink_every``.
        multiple_of: with ``shrink_every``, leave a multiple of so many units in each group; 8 on a GPU, see `shrink`.

    Frozen parameters are never changed. A unit with frozen w is penalised with its |w| as a constant; one with frozen v
    is left out, and its w gets ordinary weight decay. A w that is frozen in part, or whose bias is, cannot be held at 1
    and is decayed as |w| |v| asks.

    Units that are not homogeneous (``find_units(..., homogeneous_only=False)``) have weight_decay * |v| as their
    penalty: v is soft-thresholded, and w gets ordinary weight decay.
    """

    def __init__(
        self,
        units: Units,
        weight_decay: float,
        balance: bool = True,
        bias: bool = False,
        *,
        decoupled: bool | None = None,
        shrink_every: int | None = None,
        patience: int = 100,
        multiple_of: int = 1,
    ) -> None:
        super().__init__(units, weight_decay, decoupled=decoupled)
        if not units.couplings:
            raise ValueError(f"the model has no homogeneous units to penalise.\n{units}")
        if shrink_every is not None and shrink_every < 1:
            raise ValueError(f"shrink_every must be a number of steps, 1 or more, got {shrink_every}")
        self.balance = balance
        self.bias = bias
        self._couplings = [
            Coupling(group, self._w(group), asleep=torch.zeros(len(group), dtype=torch.int64))
            for group in units.couplings
        ]
        self._plan: Plan | None = None
        self._fast = FastPath(BALANCE_LIMIT)
        self._ok: Tensor | None = None
        self.shrink_every = shrink_every
        self.patience = patience
        self.multiple_of = checked_multiple(multiple_of)
        self._steps = 0
        self._stuck: set[int] = set()

    # Algorithm 1.

    def _after_step_(self, ok: Tensor | None) -> None:
        self._ok = None
        plan = self._fast.taken or self._make_plan()
        if not self._fast.step_(self, plan, ok):
            self._measure(plan, ok)
            for c in plan.couplings:
                self._threshold_v_(c)
                self._project_w_(c)
            for s in plan.others:
                self._decay_(s, torch.ones(1, device=self._parameter(s).device))
            self._balance_(plan)
        self._count_asleep(plan)

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

    # What the algorithm stands on.

    def _start_(self) -> None:
        self._ok = None
        if (
            self.shrink_every is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            raise ValueError(
                "shrink_every does not go with several processes: DDP's buckets have the old sizes. Call "
                "pathprox.shrink_(model, units, optimizer) between epochs and wrap the model in DDP again."
            )
        plan = self._make_plan()
        for chain in plan.chains:
            balance_chain_(self.units, chain, self.optimizer, BALANCE_LIMIT)
        self._remember()

    def _add_gradient_(self) -> None:
        """The penalty is not smooth and acts after the step. But weights that were edited since have to be folded."""
        self._ok = None
        for c in self._couplings:
            if c.gauge is not None and c.versions != self._versions(c):
                self._fold_(c, gradients=True)

    def _takes_over(self) -> bool:
        if not self._fast.may_take_over(self):
            return False
        if any(c.gauge is not None and c.versions != self._versions(c) for c in self._couplings):
            return False
        return self._fast.take_over(self, self._make_plan())

    def _remember(self) -> None:
        for c in self._couplings:
            c.versions = self._versions(c)

    def _versions(self, c: Coupling) -> list[int]:
        return [self._parameter(s)._version for s in c.into]

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._fast.taken is not None:
            with torch.no_grad():
                self._after_step_(None)
        else:
            super()._after(optimizer, args, kwargs)
        if self.shrink_every is not None and self._steps % self.shrink_every == 0 and not capturing():
            self.remove_settled()
        self._remember()

    # Removing units.

    def _w(self, group: UnitGroup) -> tuple[Slice, ...]:
        """The slices that make up w."""
        return group.into + (group.bias if self.bias else ())

    def _count_asleep(self, plan: Plan) -> None:
        self._steps += 1
        for c in plan.couplings if self.shrink_every is not None else ():
            c.asleep = c.asleep.to(c.v_norm.device)
            c.asleep.add_(1).mul_(c.v_norm == 0)  # in place, so that replays of a CUDA graph count too

    def remove_settled(self) -> int:
        """Remove the units that have been dead for ``patience`` steps, and say how many that were.

        With ``shrink_every`` this happens by itself, except where steps are replayed from a CUDA graph, which runs no
        Python: there call it between replays, and record the step anew if it says more than 0. A group that cannot be
        shrunk is not tried again.
        """
        if self.shrink_every is None:
            raise ValueError("sleeping units are counted only with shrink_every: give PathProx(shrink_every=...)")
        before = sum(map(len, self.units))
        settled = [torch.zeros(len(g), dtype=torch.bool) for g in self.units]
        for i, c in zip(self.units.coupled, self._couplings, strict=True):
            if i not in self._stuck:
                settled[i] = keep_multiple((c.asleep >= self.patience).cpu(), self.multiple_of)
        if any(bool(mask.any()) for mask in settled):
            sizes = [len(g) for g in self.units]
            shrink_(self.units.model, self.units, self.optimizer, settled=settled, multiple_of=self.multiple_of)
            self._stuck |= {i for i, g in enumerate(self.units) if settled[i].any() and len(g) == sizes[i]}
            self._notice_removal()
        return before - sum(map(len, self.units))

    def _follow_units_(self, kept: tuple[Tensor, ...]) -> None:
        super()._follow_units_(kept)
        for i, c in zip(self.units.coupled, self._couplings, strict=True):
            still = torch.isin(kept[i], self.units.kept[i])
            c.group = self.units[i]
            c.into = self._w(c.group)
            c.asleep = c.asleep[still.to(c.asleep.device)]
            if c.gauge is not None:
                c.gauge = c.gauge[still.to(c.gauge.device)]
                self._fold_(c)  # w may have listened to units that said nothing, and be shorter now
        self._plan = None
        self._remember()

    def _make_plan(self) -> Plan:
        """Which couplings are penalised; made anew when parameters were frozen, thawed or given to the optimizer."""
        self._trained = self._options()
        key = tuple(tuple(id(p) for p in g["params"] if p.requires_grad) for g in self.optimizer.param_groups)
        if self._plan is None or self._plan.key != key:
            inside = {s.name for c in self._couplings for s in c.group.bias} if self.bias else set()

            def free(s: Slice) -> bool:
                return id(self._parameter(s)) in self._trained

            couplings = [c for c in self._couplings if all(map(free, c.group.out))]
            chosen = {id(c.group) for c in couplings}
            for c in self._couplings:
                sound = id(c.group) in chosen and c.group.homogeneous
                c.held = sound and all(map(free, c.group.into + c.group.bias))
                if not c.held:
                    c.gauge = None
                elif c.gauge is None:
                    self._fold_(c)
            chains = []
            if self.balance:
                chains = find_links(
                    self.units, lambda group: id(group) in chosen, lambda s: free(s) and s.name not in inside
                )
            self._plan = Plan(key, couplings, self.units.others([c.group for c in couplings]), chains)
            self._fast.forget()
        return self._plan

    def _fold_(self, c: Coupling, gradients: bool = False) -> None:
        """Bring w to norm 1 and pay with v: the function stays. A unit with w = 0 has to wait until it has grown."""
        norm = self.units.norm(c.into)
        factor = normalize_factor(norm)
        factor = torch.where((factor - 1).abs() < HELD, 1, factor)
        c.gauge = (norm > 0).to(norm)
        c.waiting = bool((norm == 0).any())
        factor = self._gated(factor)
        rescale_(self.units, c.group, factor, 1 / factor, self.optimizer)
        for slices, inverse in ((c.group.into + c.group.bias, 1 / factor), (c.group.out, factor)):
            for s in slices if gradients else ():
                gradient = self._parameter(s).grad
                if gradient is not None:
                    s.scale_(gradient, inverse)

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

    def _wake_(self, c: Coupling) -> None:
        """Units that had w = 0 and have grown are folded, since projecting them would change the function."""
        assert c.gauge is not None
        norm = self.units.norm(c.into)
        woken = (c.gauge.to(norm) == 0) & (norm > AWAKE) & norm.isfinite()
        factor = torch.where(woken, normalize_factor(norm), 1)
        factor = self._gated(factor)
        rescale_(self.units, c.group, factor, 1 / factor, self.optimizer)
        c.gauge = torch.where(woken, 1, c.gauge.to(norm))

    def _steps_now(self, s: Slice) -> bool:
        """Whether the slice's parameter took part in this step."""
        number = id(self._parameter(s))
        return number in self._stepping and number in self._trained

    def _step(self, s: Slice) -> Tensor | float:
        parameter = self._parameter(s)
        return self._step_size(parameter, self._trained[id(parameter)])

    def _scale_(self, s: Slice, factor: Tensor, carry: bool = False) -> None:
        """Multiply by one factor a unit; ``carry``: the function stays, so let the optimizer's state follow."""
        scale_(self.units, s, self._gated(factor), self.optimizer if carry else None)

    def _gated(self, factor: Tensor) -> Tensor:
        return factor if self._ok is None else torch.where(self._ok, factor, 1)

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        gauges = {name: c.gauge for name, c in self._names().items() if c.gauge is not None}
        asleep = {name: c.asleep for name, c in self._names().items()} if self.shrink_every is not None else {}
        return {**super().state_dict(), "gauge": gauges, "asleep": asleep, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = self._names()
        for name, gauge in state.get("gauge", {}).items():
            if name not in names or len(names[name].group) != len(gauge):
                raise ValueError(
                    f"the saved state has {len(gauge)} units in the coupling {name!r}, which this model does not have"
                )
        super().load_state_dict(state)
        for name, c in names.items():
            gauge = state["gauge"].get(name)
            c.gauge = None if gauge is None else gauge.clone()
            c.waiting = gauge is not None and bool((gauge == 0).any())
            c.versions = self._versions(c)
            c.asleep = state.get("asleep", {}).get(name, torch.zeros(len(c.group), dtype=torch.int64)).clone()
        self._steps = state.get("steps", 0)
        self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plan": None}

    def _names(self) -> dict[str, Coupling]:
        return {f"{i}: {c.group.name}": c for i, c in enumerate(self._couplings)}
