"""Algorithm 1 on all weights at once, where one factor a unit is all it takes.

With one step size for a whole parameter (SGD; AdamW, whose decay is decoupled) the projection, the threshold, the decay
and the balance each multiply a unit's weights by a number. So the weights are read once, for the norms; the factors are
worked out together, on vectors with one entry a unit; and the weights are multiplied once. On a GPU with Triton these
are four kernels for all layers (`pathprox.kernels`), elsewhere a few operations of torch for each. Fused SGD on such a
GPU leaves its own step to the same kernels, which saves it a pass over the memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from pathprox.guard import Guard
from pathprox.layout import Layout, Piece, UnfitError
from pathprox.prox import normalize_factor, shrink_factor
from pathprox.tiles import Address, Tables

Decay = Mapping[int, Tensor | float]
"""step * weight_decay of each parameter group that is needed."""


def load_kernels(device: torch.device) -> ModuleType | None:
    """The kernels, where they can run."""
    if device.type != "cuda":
        return None
    try:
        from pathprox import kernels
    except ImportError:
        return None
    return kernels


def capturing() -> bool:
    """Whether a CUDA graph is being captured: no table can be sent to the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class FusedStep:
    """A plan's weights and biases, and how to take all of them through one step."""

    def __init__(self, layout: Layout, gauges: Sequence[Tensor], limit: float) -> None:
        first = layout.pieces[0].parameter
        self.layout, self.limit = layout, limit
        self.device, self.dtype = first.device, first.dtype
        if self.device.type not in ("cpu", "cuda") or self.dtype not in (torch.float32, torch.float64):
            raise UnfitError
        if any((p.parameter.device, p.parameter.dtype) != (self.device, self.dtype) for p in layout.pieces):
            raise UnfitError
        self._signature = self._sign()
        slots = layout.slots
        wide: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        self.gauges = list(gauges)
        self.gauge = torch.ones(slots.couplings, slots.most, **wide)
        self.decay = torch.zeros(1 + max(layout.used), **wide)
        """step * weight_decay of each parameter group."""
        self.v_norm = torch.zeros(slots.couplings, slots.most, **wide)
        """|v| of every unit after its threshold."""
        self._make_tables()
        self.follow_gauges()

    def _make_tables(self) -> None:
        slots, pieces = self.layout.slots, self.layout.pieces[: self.layout.measured]
        move: dict[str, Any] = {"device": self.device}
        self._of_coupling, self._of_other = (torch.tensor(g, dtype=torch.int64, **move) for g in self.layout.groups)
        linked = (self.layout.links > 0).double()
        upto = (self.layout.links == 2).double()
        each = torch.eye(slots.couplings, dtype=torch.float64)
        self._linked = linked.to(**move)
        self._even = (linked / linked.sum(1, keepdim=True) - each).to(**move)
        self._exponents = torch.cat([each, upto, *(p * x for p in slots.powers for x in (each, upto))]).to(**move)
        self._one = torch.ones(1, dtype=torch.float64, **move)
        self._squares, self._square_views = self._by_position(pieces)
        self._measured = torch.cat([p.slots for p in pieces]).to(**move)
        self._square_sums = torch.zeros(slots.one + 1, dtype=torch.float64, **move)
        self._targets: list[Piece] = []
        self._decay_set: Decay = {}
        self._thresholds: tuple[Tensor, Tensor] | None = None
        self._kernels = load_kernels(self.device)
        if self._kernels is not None and slots.couplings > self._kernels.WIDEST:
            self._kernels = None
        self.tables: Tables | None = None
        """For the kernels, after the optimizer's step."""
        self.whole: Tables | None = None
        """For the kernels that take the optimizer's step as well, if they can."""
        self._whole_momentum: bool | None = None
        """Whether those are for SGD with momentum; None before they were made."""
        self._captured: list[Tables] = []
        """Tables that a CUDA graph knows: they must not go."""
        self._skip = torch.ones(1, **move)

    def _by_position(self, pieces: Sequence[Piece]) -> tuple[Tensor, list[Tensor]]:
        """One number for each position of these pieces, and the same as views to multiply each piece with."""
        sizes = [len(p.slots) for p in pieces]
        values = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
        return values, [part.view(p.positions) for p, part in zip(pieces, values.split(sizes), strict=True)]

    def _sign(self) -> list[Any]:
        return [(p.parameter.stride(), p.parameter.dtype, p.parameter.device) for p in self.layout.pieces]

    def is_valid(self, gauges: Sequence[Tensor | None]) -> bool:
        """Whether parameters lie in memory as when this was made, and are held at the same norms."""
        same = len(gauges) == len(self.gauges) and all(a is b for a, b in zip(gauges, self.gauges, strict=True))
        return same and self._sign() == self._signature

    def follow_gauges(self) -> None:
        """The norms have changed, in the tensors this was made with."""
        for row, gauge in zip(self.gauge, self.gauges, strict=True):
            row[: len(gauge)].copy_(gauge)
        self._thresholds = None

    def step_(self, decay: Decay, optimizer: Optimizer, ok: Tensor | None, guard: Guard) -> bool:
        """Take all weights through one step; ``decay`` is step * weight_decay for each parameter group.

        False, and nothing is changed, where the general path has to do it: the optimizer's memory does not lie as the
        weights do, or a norm is not finite on the CPU.
        """
        found = self._find_states(optimizer)
        if found is None or not self._aim(found[0]):
            return False
        if self._step_with_kernels_(*found, decay, ok, guard):
            return True
        if self.device.type != "cpu" or decay != self._decay_set:  # a captured graph sets what it was captured with
            self._decay_set = decay
            for group, value in decay.items():
                self.decay[group].fill_(value)
            self._thresholds = None
        if self._thresholds is None:
            others = 1 / (1 + self.decay[self._of_other])
            self._thresholds = self.decay[self._of_coupling][:, None] * self.gauge, others
        norms = self._norms()
        if self.device.type == "cpu":
            if not math.isfinite(norms.sum().item()):
                return False
        else:
            ok = guard.count_weights(norms.sum().isfinite(), ok)
        torch.index_select(self._factors(norms, self._thresholds, ok).to(self.dtype), 0, self._slots, out=self._values)
        torch._foreach_mul_([p.view(x) for p, x in zip(*found, strict=True)], self._views)
        return True

    def _aim(self, pieces: list[Piece]) -> bool:
        """Make room for the factors of these pieces, unless it is there."""
        if self._targets != pieces:
            if capturing():
                return False
            self._targets = pieces
            self._values, self._views = self._by_position(pieces)
            self._slots = torch.cat([p.slots for p in pieces]).to(self.device)
        return True

    def _step_with_kernels_(
        self, pieces: list[Piece], tensors: list[Tensor], decay: Decay, ok: Tensor | None, guard: Guard
    ) -> bool:
        """The same on a GPU with Triton; False without."""
        if self._kernels is None:
            return False
        if self.tables is None or self.tables.made_of is not self._targets:
            if capturing():
                return False
            self.tables = Tables(self.layout, self._targets, [0] * len(pieces))
        rates = [[decay.get(group, 0.0), *[0.0] * 7] for group in range(self.tables.groups)]
        return self._launch_(self.tables, [(x.data_ptr(), 0, 0) for x in tensors], rates, tensors, ok, guard)

    def _launch_(
        self,
        tables: Tables,
        addresses: list[Address],
        rates: list[list[Tensor | float]],
        changed: list[Tensor],
        ok: Tensor | None,
        guard: Guard,
    ) -> bool:
        assert self._kernels is not None
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if not tables.send(addresses, rates, capturing()):
                return False
            if capturing() and tables not in self._captured:
                self._captured.append(tables)
            try:
                self._kernels.launch(
                    tables, self.gauge, self.v_norm, math.log(self.limit), ok, guard.counter(self.device)
                )
            except Exception as error:
                warnings.warn(f"Triton cannot build PathProx's kernels, so steps are slower: {error}", stacklevel=2)
                self._kernels = None
                return False
        torch.autograd.graph.increment_version(changed)  # which kernels do not do by themselves
        return True

    # The optimizer's own step with it.

    @property
    def has_kernels(self) -> bool:
        """The first step shows whether they can be built."""
        return self._kernels is not None and self.tables is not None

    def take_over(self, optimizer: Optimizer) -> bool:
        """Before the step: whether the kernels will take it. If so, the optimizer is told to skip its own."""
        if type(optimizer) is not SGD or not _is_plain(optimizer):
            return False
        if self._whole_momentum != _has_momentum(optimizer):  # which may be switched on or off in training
            if capturing():
                return False
            self._whole_momentum, self.whole = _has_momentum(optimizer), self._make_whole(optimizer)
        if self.whole is None or _memory_of(self.whole.made_of, optimizer) is None:
            return False
        if capturing() and not self.whole.can_be_captured:
            return False
        optimizer.found_inf = self._skip  # type: ignore[attr-defined]
        return True

    def give_back(self, optimizer: Optimizer) -> None:
        """After the step: the next one is the optimizer's again."""
        if getattr(optimizer, "found_inf", None) is self._skip:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def whole_step_(self, decay: Decay, optimizer: Optimizer, guard: Guard) -> bool:
        """After a step that the optimizer has skipped."""
        assert self.whole is not None
        memory = _memory_of(self.whole.made_of, optimizer)  # asked again: a hook may have put other gradients there
        assert memory is not None
        weights = [p.parameter.detach() for p in self.whole.made_of]
        addresses = [
            (x.data_ptr(), g.data_ptr(), 0 if m is None else m.data_ptr())
            for x, (g, m) in zip(weights, memory, strict=True)
        ]
        rates = [[decay.get(i, 0.0), *_sgd_rates(group)] for i, group in enumerate(optimizer.param_groups)]
        changed = weights + [m for _, m in memory if m is not None]
        return self._launch_(self.whole, addresses, rates, changed, None, guard)

    def _make_whole(self, optimizer: Optimizer) -> Tables | None:
        """Tables of all that the optimizer trains: what the layout does not name has the factor 1."""
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = {id(p.parameter) for p in self.layout.pieces}
        rest = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
        one = torch.tensor([self.layout.slots.one])
        pieces = [*self.layout.pieces, *(Piece(p, (1, 1, p.numel()), True, one) for p in rest)]
        largest = max(p.parameter.numel() for p in pieces)
        fine = all((p.dtype, p.device) == (self.dtype, self.device) and _is_dense(p) and p.requires_grad for p in rest)
        if not fine or largest >= 2**31 or any(id(p.parameter) not in groups for p in pieces):
            return None
        numbers = [groups[id(p.parameter)] for p in pieces]
        return Tables(self.layout, pieces, numbers, sgd=True, momentum=_has_momentum(optimizer))

    def _find_states(self, optimizer: Optimizer) -> tuple[list[Piece], list[Tensor]] | None:
        """All that is multiplied."""
        pieces, tensors = list(self.layout.pieces), [p.parameter.detach() for p in self.layout.pieces]
        for p in self.layout.states:
            state = optimizer.state.get(p.parameter, {}).get(p.state)
            if isinstance(state, Tensor):
                if state.stride() != p.parameter.stride() or (state.dtype, state.device) != (self.dtype, self.device):
                    return None
                pieces.append(p)
                tensors.append(state)
        return pieces, tensors

    def _norms(self) -> Tensor:
        """|w| and |v| of every unit: (2, couplings, units).

        torch sums squares pairwise, and so well enough in the weights' own type: 1e5 equal ones are exact to 4e-7. What
        several rows and columns add to one unit is summed in float64.
        """
        for p, out in zip(self.layout.pieces, self._square_views, strict=False):
            torch.sum(p.view(p.parameter.detach()).square(), (1, 2) if p.by_row else 1, keepdim=True, out=out)
        slots = self.layout.slots
        sums = self._square_sums.zero_()
        squares = self._squares.double()
        if self.device.type == "cpu":
            sums.index_add_(0, self._measured, squares)
        else:  # sorts, and so adds in the same order on every replica
            sums.index_put_((self._measured,), squares, accumulate=True)
        return sums[: slots.other].view(2, slots.couplings, slots.most).sqrt()

    def _factors(self, norms: Tensor, thresholds: tuple[Tensor, Tensor], ok: Tensor | None) -> Tensor:
        """The factor of every slot."""
        (w, v), (threshold, others) = norms, thresholds
        shrink = shrink_factor(v, threshold)
        torch.mul(v, shrink, out=self.v_norm)
        layer, *behind = self._balance((self.gauge * self.v_norm).sum(1))
        parts = [
            normalize_factor(w, self.gauge).flatten(),
            (shrink * layer[:, None]).flatten(),
            others,
            *behind,
            self._one,
        ]
        factors = torch.cat(parts)
        return factors if ok is None else torch.where(ok, factors, 1)

    def _balance(self, totals: Tensor) -> tuple[Tensor, ...]:
        """`layer_factors` for all chains at once. By coupling: what v is multiplied by, the biases behind, the states.

        A dead coupling counts as tiny, so that its chain is left as it is, as by any other that is far too small.
        """
        log = totals.clamp_min(torch.finfo(totals.dtype).tiny).log()
        step = self._even @ log
        unsound = self._linked @ (step.abs() > math.log(self.limit)).double()
        step = torch.where(unsound > 0, 0, step)
        return (self._exponents @ step).exp().split(self.layout.slots.couplings)


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether all groups of SGD are fused and of one kind, and no GradScaler is at work."""
    groups = optimizer.param_groups
    scaled = any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale"))
    alike = all(bool(group["momentum"]) == _has_momentum(optimizer) for group in groups)
    return alike and not scaled and all(group["fused"] and not group["differentiable"] for group in groups)


def _has_momentum(optimizer: Optimizer) -> bool:
    return bool(optimizer.param_groups[0]["momentum"])


def _memory_of(pieces: Sequence[Piece], optimizer: Optimizer) -> list[tuple[Tensor, Tensor | None]] | None:
    """The gradient and the momentum of each piece; None if one is missing or does not lie as the weights do."""
    momentum = _has_momentum(optimizer)
    found: list[tuple[Tensor, Tensor | None]] = []
    for p in pieces:
        x, gradient = p.parameter, p.parameter.grad
        buffer = optimizer.state.get(x, {}).get("momentum_buffer") if momentum else None
        for tensor in (gradient, buffer) if momentum else (gradient,):
            if tensor is None or tensor.layout != torch.strided or tensor.stride() != x.stride():
                return None
            if (tensor.dtype, tensor.device) != (x.dtype, x.device):
                return None
        assert gradient is not None
        found.append((gradient, buffer))
    return found


def _sgd_rates(group: Mapping[str, Any]) -> list[Tensor | float]:
    """lr, momentum, 1 - dampening, weight decay, sign, and how much of gradient and momentum the weights move by."""
    momentum, nesterov, lr = group["momentum"], group["nesterov"], group["lr"]
    lr = float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
    sign = -1.0 if group["maximize"] else 1.0
    mix = (1.0, momentum) if nesterov else (0.0, 1.0)
    return [lr, momentum, 1.0 - group["dampening"], group["weight_decay"], sign, *mix]


def _is_dense(x: Tensor) -> bool:
    """Whether its numbers fill one stretch of memory, in any order."""
    return torch.ops.aten.is_non_overlapping_and_dense(x.detach()) if x.numel() else False
