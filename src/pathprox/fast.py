"""Which way a step of PathProx takes: the fused one where it applies, in whole or after the optimizer's own step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pathprox.coupling import Plan
from pathprox.fused import Decay, FusedStep, capturing
from pathprox.layout import UnfitError, make_layout

if TYPE_CHECKING:
    from pathprox.optim import PathProx


class FastPath:
    """The fused step of a `PathProx`, made when first needed and again when parameters have moved."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.on = True
        """Tests compare the ways; a variation of the algorithm knows the general one alone."""
        self.step: FusedStep | None = None
        self.taken: Plan | None = None
        """The plan of the step that the optimizer is in, if it skips it since the kernels will take it."""
        self._unfit: Plan | None = None
        self._captured: list[FusedStep] = []
        """Those whose addresses a CUDA graph knows: they must not go."""

    def forget(self) -> None:
        self.step = None

    def follow_gauges(self) -> None:
        """The norms that w is held at have changed, each in its place."""
        if self.step is not None:
            self.step.follow_gauges()

    def may_take_over(self, prox: PathProx) -> bool:
        """Before the optimizer's step, and cheap: whether it is worth to ask `take_over`."""
        if self.taken is not None and self.step is not None:  # the last step ended with an error
            self.step.give_back(prox.optimizer)
        self.taken = None
        return self.on and self.step is not None and self.step.has_kernels

    def take_over(self, prox: PathProx, plan: Plan) -> bool:
        """Let the kernels take the optimizer's step, if they can."""
        step = self._find(prox, plan)
        if step is not None and self._applies(prox, step) and step.take_over(prox.optimizer):
            self.taken = plan
        return self.taken is not None

    def step_(self, prox: PathProx, plan: Plan, ok: Tensor | None) -> bool:
        """After it: the whole algorithm at once, where every unit takes one factor; else False."""
        if self.taken is not None:
            self.taken = None
            assert self.step is not None
            self.step.give_back(prox.optimizer)
            if not self.step.whole_step_(self._decay(prox, self.step), prox.optimizer, prox._guard):
                raise RuntimeError("the optimizer's step was left to PathProx's kernels, which could not be started")
            self._tell_norms(prox, plan, self.step)
            return True
        step = self._find(prox, plan)
        if step is None or not self._applies(prox, step):
            return False
        if not step.step_(self._decay(prox, step), prox.optimizer, ok, prox._guard):
            return False
        self._tell_norms(prox, plan, step)
        return True

    def _applies(self, prox: PathProx, step: FusedStep) -> bool:
        if prox._rule.per_weight and not all(map(prox._is_decoupled, prox.optimizer.param_groups)):
            return False
        return step.layout.stepping <= prox._stepping

    def _decay(self, prox: PathProx, step: FusedStep) -> Decay:
        first, groups = step.layout.pieces[0].parameter, prox.optimizer.param_groups
        return {i: prox._step_size(first, groups[i]) * prox.weight_decay for i in step.layout.used}

    def _tell_norms(self, prox: PathProx, plan: Plan, step: FusedStep) -> None:
        if prox.shrink_every is not None:
            for c, norms in zip(plan.couplings, step.v_norm, strict=True):
                c.v_norm = norms[: len(c.group)]

    def _find(self, prox: PathProx, plan: Plan) -> FusedStep | None:
        """The plan laid out in memory, made anew when that has changed; None where the fast path does not apply."""
        if not self.on or plan is self._unfit or any(c.waiting for c in plan.couplings):
            return None
        gauges = [c.gauge for c in plan.couplings if c.gauge is not None]
        if self.step is None or not self.step.is_valid(gauges):
            if capturing():
                return None
            group_of = {number: i for i, numbers in enumerate(plan.key) for number in numbers}
            try:
                layout = make_layout(
                    plan.couplings, plan.others, plan.chains, prox._parameter, group_of, prox._rule.powers
                )
                self.step = FusedStep(layout, gauges, self.limit)
            except UnfitError:
                self.step, self._unfit = None, plan
        if capturing() and self.step is not None and self.step not in self._captured:
            self._captured.append(self.step)
        return self.step

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find their own way."""
        return {**self.__dict__, "step": None, "taken": None, "_unfit": None, "_captured": []}
