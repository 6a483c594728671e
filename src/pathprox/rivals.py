"""The methods that the paper compares PathProx with, each attached to an optimizer in the same way.

All but the decoupled form of `WeightDecay` add the (sub)gradient of a penalty to the gradient of the loss, which is
what "SGD on that objective" means. None of them reaches exact zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pathprox.balance import rescale_
from pathprox.prox import normalize_factor
from pathprox.regularizer import Regularizer
from pathprox.slices import Slice
from pathprox.units import UnitGroup

__all__ = ["GroupLasso", "Lasso", "NormalizedWeightDecay", "PathNorm", "WeightDecay"]


class GradientPenalty(Regularizer):
    """A penalty whose subgradient is added to the gradient of the loss before each step."""

    @abstractmethod
    def _subgradients(self) -> Iterator[tuple[Slice, Tensor]]:
        """For weight_decay = 1: slices, and what to add to each one's view of the gradient."""

    def _start_(self) -> None:
        pass

    def _after_step_(self, ok: Tensor | None) -> None:
        pass

    def _add_gradient_(self) -> None:
        trained = self._options()
        scale = getattr(self.optimizer, "grad_scale", None)  # set where a fused optimizer unscales the gradients itself
        sums: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for s, piece in self._subgradients():
            parameter = self._parameter(s)
            if parameter.grad is None or id(parameter) not in trained:
                continue
            if parameter.grad.is_sparse:
                raise TypeError(
                    f"the gradient of {s.name} is sparse, and {type(self).__name__} adds to all of it. "
                    "Make the embedding with sparse=False, or use PathProx."
                )
            factor = -self.weight_decay if trained[id(parameter)].get("maximize") else self.weight_decay
            gradients, pieces = sums.setdefault(factor, ([], []))
            gradients.append(s.view(parameter.grad))
            pieces.append(piece if scale is None else piece * scale)
        for factor, (gradients, pieces) in sums.items():
            torch._foreach_add_(gradients, pieces, alpha=factor)

    def _weights(self) -> Iterator[tuple[Slice, Tensor]]:
        """Every penalised weight, by the rows of its layer."""
        for s in self.units.rows():
            yield s, s.view(self._parameter(s).detach())


class WeightDecay(GradientPenalty):
    """Plain weight decay, as torch does it: weight_decay/2 times the sum of squared weights. Biases are not penalised.

    With AdamW (or ``decoupled=True``) the weights are multiplied by ``1 - lr * weight_decay`` before the step instead.
    """

    def _subgradients(self) -> Iterator[tuple[Slice, Tensor]]:
        trained = self._options()
        for s, weight in self._weights():
            options = trained.get(id(self._parameter(s)))
            if options is not None and not self._is_decoupled(options):
                yield s, weight

    def _add_gradient_(self) -> None:
        super()._add_gradient_()
        trained = self._options()
        skipped = getattr(
            self.optimizer, "found_inf", None
        )  # a fused optimizer is about to skip this step where it is 1
        for s, weight in self._weights():
            options = trained.get(id(self._parameter(s)))
            if options is not None and self._parameter(s).grad is not None and self._is_decoupled(options):
                decay = options["lr"] * self.weight_decay
                weight.mul_(1 - decay if skipped is None else 1 - decay * (1 - skipped))


class PathNorm(GradientPenalty):
    """SGD on the path-norm objective G: the penalty of PathProx without its proximal step."""

    def _start_(self) -> None:
        self._others = self.units.others()

    def _follow_units_(self, kept: tuple[Tensor, ...]) -> None:
        super()._follow_units_(kept)
        self._others = self.units.others()

    def _subgradients(self) -> Iterator[tuple[Slice, Tensor]]:
        for group in self.units.couplings:
            w, v = self.units.norm(group.into), self.units.norm(group.out)
            pairs = ((group.into, w, v), (group.out, v, w))
            for slices, mine, other in pairs if group.homogeneous else ((group.out, v, torch.ones_like(v)),):
                for s in slices:
                    weight = self._parameter(s).detach()
                    pull = torch.where(mine > 0, other / torch.where(mine > 0, mine, 1), 0).to(weight)
                    yield s, s.view(weight) * s.expand(pull, fill=0)
        for s in self._others:
            weight = self._parameter(s).detach()
            yield s, s.view(weight) * s.expand(torch.ones(1).to(weight), fill=0)


class Lasso(GradientPenalty):
    """The sum of absolute weights."""

    def _subgradients(self) -> Iterator[tuple[Slice, Tensor]]:
        for s, weight in self._weights():
            yield s, weight.sign()


class GroupLasso(GradientPenalty):
    """The sum of norms of the rows of every layer, a row being all the weights that feed one output."""

    def _subgradients(self) -> Iterator[tuple[Slice, Tensor]]:
        for s, weight in self._weights():
            norm = s.square_sum(weight).sqrt()
            yield s, weight * s.expand(torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0))


class NormalizedWeightDecay(WeightDecay):
    """Weight decay with every unit's w projected to the unit sphere after each step.

    |w| is folded into v at the start, so that the function is the same. Units with frozen parts are left as they are.
    """

    def _start_(self) -> None:
        self._folded: set[int] = set()
        self._hold_(None)

    def _follow_units_(self, kept: tuple[Tensor, ...]) -> None:
        super()._follow_units_(kept)
        self._start_()

    def _after_step_(self, ok: Tensor | None) -> None:
        super()._after_step_(ok)
        self._hold_(ok)

    def _hold_(self, ok: Tensor | None) -> None:
        """Project every w that is free; fold |w| into v when it is held for the first time, or again after a freeze."""
        trained = self._options()
        held: dict[torch.device, list[UnitGroup]] = {}
        for i, group in enumerate(g for g in self.units.couplings if g.homogeneous):
            if not all(id(self._parameter(s)) in trained for s in group.into + group.bias + group.out):
                self._folded.discard(i)
            elif i in self._folded:
                held.setdefault(self._parameter(group.into[0]).device, []).append(group)
            else:
                factor = self._factors(group, ok=ok)
                rescale_(self.units, group, factor, 1 / factor, self.optimizer)
                self._folded.add(i)
        for groups in held.values():
            self._project_(groups, ok)

    def _project_(self, groups: Sequence[UnitGroup], ok: Tensor | None) -> None:
        """All at once: on a GPU, and for small layers, many small operations would take longer than the arithmetic."""
        factors = self._factors(*groups, ok=ok).split([len(group) for group in groups])
        slices = [(s, factor) for group, factor in zip(groups, factors, strict=True) for s in group.into]
        views = [s.view(self._parameter(s).detach()) for s, _ in slices]
        parts = [s.expand(factor.to(view.dtype)) for (s, factor), view in zip(slices, views, strict=True)]
        torch._foreach_mul_(views, parts)

    def _factors(self, *groups: UnitGroup, ok: Tensor | None) -> Tensor:
        """1 / |w| of all units of these groups; 1 where the step does not count."""
        factors = normalize_factor(torch.cat([self.units.norm(group.into) for group in groups]))
        return factors if ok is None else torch.where(ok, factors, 1)
