"""Keeping numbers that are not finite out of the weights.

On the CPU a gradient that is not finite is an error, raised before the optimizer moves anything. On a GPU that would
cost a host synchronisation in every step, so there the step is undone on the device and counted, and `Guard.check`
raises.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from pathprox.text import shortened


class Guard:
    def __init__(self) -> None:
        self._skipped: Tensor | None = None
        self._mine: Tensor | None = None
        self._backup: list[tuple[Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Look at the gradients the optimizer is about to use; ``names`` are for the message, by id."""
        if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler leaves the decision to the fused optimizer
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [_dense(p.grad) for p in parameters]
        if gradients[0].device.type == "cpu":
            if not cmath.isfinite(sum(g.sum().item() for g in gradients)):  # half the time of a norm
                _raise([(names.get(id(p), "a parameter outside the model"), p.grad) for p in parameters])
            return
        total = get_total_norm(gradients)
        self._mine = (~total.isfinite()).float()
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self._mine  # type: ignore[attr-defined]
            return
        for p in parameters:
            self._backup.append((p.detach(), p.detach().clone()))
            p.grad.masked_fill_(self._mine.bool(), 0)

    def after(self, optimizer: Optimizer) -> Tensor | None:
        """Whether the step counts, as a boolean on the device, or None where nothing stands against it."""
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        if self._mine is not None:
            found, self._mine = self._mine, None
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
            for parameter, old in self._backup:
                parameter.copy_(torch.where(found.bool(), old, parameter))
            self._backup.clear()
            self._count(found)
        return None if found is None else found.reshape(()) == 0

    def weights(self, norms: dict[str, tuple[Tensor, Tensor]], ok: Tensor | None) -> Tensor | None:
        """The same question to the weights after the step, by the norms of their units."""
        if not norms:
            return ok
        total = torch.stack([n.sum() for pair in norms.values() for n in pair]).sum()
        if total.device.type != "cpu":
            return self.count_weights(total.isfinite(), ok)
        if not total.isfinite():
            bad = [name for name, pair in norms.items() if not all(bool(n.isfinite().all()) for n in pair)]
            if bad:
                raise FloatingPointError(
                    f"the weights of {shortened(bad)} are not finite after the optimizer's step. "
                    f"PathProx left them as they are. {_CURE}"
                )
        return ok

    def count_weights(self, finite: Tensor, ok: Tensor | None) -> Tensor:
        """On the device: whether the step still counts, now that the weights are known to be finite or not."""
        self._count((~finite if ok is None else ok & ~finite).float())
        return finite if ok is None else ok & finite

    def counter(self, device: torch.device) -> Tensor:
        """The number of steps undone: on the device, and in one place, so that a CUDA graph counts its replays too."""
        if self._skipped is None or self._skipped.device != device:
            self._skipped = torch.zeros((), device=device)
        return self._skipped

    def _count(self, skipped: Tensor) -> None:
        self.counter(skipped.device).add_(skipped.reshape(()))

    def check(self) -> None:
        """Raise if steps were undone on the device since the last call."""
        if self._skipped is None:
            return
        count = int(self._skipped)
        self._skipped.zero_()
        if count:
            raise FloatingPointError(
                f"{count} step(s) had gradients or weights that are not finite; "
                f"the weights were kept as they were before each. {_CURE}"
            )


_CURE = "Lower the learning rate, clip the gradients (torch.nn.utils.clip_grad_norm_) or use a GradScaler with float16."


def _dense(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _raise(gradients: list[tuple[str, Tensor]]) -> None:
    """The sum is not finite: an error if some entry is not finite (large finite ones are the user's business)."""
    bad = [name for name, gradient in gradients if not bool(_dense(gradient).isfinite().all())]
    if bad:
        raise FloatingPointError(
            f"the gradient of {shortened(bad)} is not finite. No weight and no optimizer state was changed. {_CURE}"
        )
