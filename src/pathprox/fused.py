"""Algorithm 1 on all weights at once, where one factor a unit is all it takes.

With one step size for a whole parameter (SGD; AdamW, whose decay is decoupled) the projection, the threshold, the decay
and the balance each multiply a unit's weights by a number. So the weights are read once, for the norms; the factors are
worked out together, on vectors with one entry a unit; and the weights are multiplied once. On a GPU with Triton these
are four kernels for all layers (`pathprox.kernels`), elsewhere a few operations of torch for each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pathprox.guard import Guard
from pathprox.layout import Layout, Piece, UnfitError
from pathprox.prox import normalize_factor, shrink_factor


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
        for row, gauge in zip(self.gauge, gauges, strict=True):
            row[: len(gauge)] = gauge
        self.decay = torch.zeros(1 + max(layout.used), **wide)
        """step * weight_decay of each parameter group."""
        self.v_norm = torch.zeros(slots.couplings, slots.most, **wide)
        """|v| of every unit after its threshold."""
        self._make_tables()

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
        self._decay_set: dict[int, Tensor | float] = {}
        self._thresholds: tuple[Tensor, Tensor] | None = None
        self._kernels = load_kernels(self.device)
        self._tables: Any = None
        self._captured: list[Any] = []
        """Tables whose addresses a CUDA graph knows: they must not go."""

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

    def step_(self, decay: dict[int, Tensor | float], optimizer: Optimizer, ok: Tensor | None, guard: Guard) -> bool:
        """Take all weights through one step; ``decay`` is step * weight_decay for each parameter group.

        False, and nothing is changed, where the general path has to do it: the optimizer's memory does not lie as the
        weights do, or a norm is not finite on the CPU.
        """
        found = self._find_states(optimizer)
        if found is None or not self._aim(found[0]):
            return False
        if self.device.type != "cpu" or decay != self._decay_set:  # a captured graph sets what it was captured with
            self._decay_set = decay
            for group, value in decay.items():
                self.decay[group].fill_(value)
            self._thresholds = None
        if self._step_with_kernels_(*found, ok, guard):
            return True
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

    def _step_with_kernels_(self, pieces: list[Piece], tensors: list[Tensor], ok: Tensor | None, guard: Guard) -> bool:
        """The same on a GPU with Triton; False without."""
        if self._kernels is None or self.layout.slots.couplings > self._kernels.WIDEST:
            return False
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self._tables is None or not self._tables.fit(tensors):
                if capturing():
                    return False
                self._tables = self._kernels.Tables(self.layout, pieces, tensors)
            if capturing() and self._tables not in self._captured:
                self._captured.append(self._tables)
            try:
                self._tables.measure()
            except Exception as error:
                warnings.warn(f"Triton cannot build PathProx's kernels, so steps are slower: {error}", stacklevel=2)
                self._kernels = None
                return False
            groups, skipped = (self._of_coupling, self._of_other), guard.counter(self.device)
            self._tables.multiply_(tensors, self.gauge, self.decay, groups, self.limit, ok, skipped, self.v_norm)
        return True

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
