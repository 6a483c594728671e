"""Units whose input weights are held at a norm, through everything that happens to a model in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pathprox.balance import balance_chain_, find_links, rescale_, scale_
from pathprox.coupling import Coupling, Plan
from pathprox.dead import checked_multiple, keep_multiple
from pathprox.fast import FastPath
from pathprox.prox import normalize_factor
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
REGAUGE = 20
"""Steps after which the norms are chosen anew, where they follow the units' strength."""


class HeldUnits(Regularizer):
    """The couplings of a network and the norms that their w is held at (their *gauge*).

    The weights may be edited, frozen or thawed between steps, units may leave, and training may stop and go on.
    """

    def __init__(
        self,
        units: Units,
        weight_decay: float,
        balance: bool = True,
        bias: bool = False,
        *,
        decoupled: bool | None = None,
        gauge: float = 0.0,
        shrink_every: int | None = None,
        patience: int = 100,
        multiple_of: int = 1,
    ) -> None:
        super().__init__(units, weight_decay, decoupled=decoupled)
        if not units.couplings:
            raise ValueError(f"the model has no homogeneous units to penalise.\n{units}")
        if not gauge >= 0:
            raise ValueError(f"gauge must not be negative, got {gauge}")
        if shrink_every is not None and shrink_every < 1:
            raise ValueError(f"shrink_every must be a number of steps, 1 or more, got {shrink_every}")
        self.balance = balance
        self.bias = bias
        self.gauge = float(gauge)
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

    def _w(self, group: UnitGroup) -> tuple[Slice, ...]:
        """The slices that make up w."""
        return group.into + (group.bias if self.bias else ())

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

    def _remember(self) -> None:
        for c in self._couplings:
            c.versions = self._versions(c)

    def _versions(self, c: Coupling) -> list[int]:
        return [self._parameter(s)._version for s in c.into]

    # Norms.

    def _gauges(self, w: Tensor, v: Tensor) -> Tensor:
        """The norm to hold w at, where |w| and |v| are these; 0 for a unit that has to wait."""
        chosen = (self.gauge * w * v).sqrt().clamp_min(1) if self.gauge else torch.ones_like(w)
        return torch.where(w > 0, chosen, 0)

    def _fold_(self, c: Coupling, gradients: bool = False) -> None:
        """Bring w to its norm and pay with v: the function stays. A unit with w = 0 has to wait until it has grown."""
        norm = self.units.norm(c.into)
        c.gauge = self._gauges(norm, self.units.norm(c.group.out))
        c.waiting = bool((norm == 0).any())
        self._rescale_(c, normalize_factor(norm, c.gauge), gradients)

    def _wake_(self, c: Coupling) -> None:
        """Units that had w = 0 and have grown are folded, since projecting them would change the function."""
        assert c.gauge is not None
        norm = self.units.norm(c.into)
        woken = (c.gauge.to(norm) == 0) & (norm > AWAKE) & norm.isfinite()
        chosen = self._gauges(norm, self.units.norm(c.group.out))
        self._rescale_(c, torch.where(woken, normalize_factor(norm, chosen), 1))
        c.gauge = torch.where(woken, chosen, c.gauge.to(norm))

    @torch.no_grad()
    def regauge(self) -> None:
        """Choose the norms of w anew, where they follow the units' strength (``gauge``); the function stays.

        This happens by itself every 20 steps, except where steps are replayed from a CUDA graph, which runs no Python:
        there call it between replays.
        """
        if not self.gauge:
            return
        self._ok = None
        for c in self._couplings:
            if c.gauge is not None and c.held:
                norm = self.units.norm(c.into)
                chosen = torch.where(c.gauge > 0, self._gauges(norm, self.units.norm(c.group.out)), 0)
                self._rescale_(c, torch.where(chosen > 0, normalize_factor(norm, chosen), 1), gradients=True)
                c.gauge.copy_(chosen)  # in place: a CUDA graph reads it
        self._fast.follow_gauges()
        self._remember()

    def _rescale_(self, c: Coupling, factor: Tensor, gradients: bool = False) -> None:
        """Multiply w by one factor a unit and divide v by it, the optimizer's memory of them the other way round."""
        factor = self._gated(torch.where((factor - 1).abs() < HELD, 1, factor))
        rescale_(self.units, c.group, factor, 1 / factor, self.optimizer)
        for slices, inverse in ((c.group.into + c.group.bias, 1 / factor), (c.group.out, factor)):
            for s in slices if gradients else ():
                gradient = self._parameter(s).grad
                if gradient is not None:
                    s.scale_(gradient, inverse)

    # Removing units.

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
            if i not in self._stuck:  # a group with too few of them for a multiple is not stuck, and not tried yet
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

    # What is trained.

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
