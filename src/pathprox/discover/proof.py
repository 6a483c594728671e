"""The proof: what discovery claims is tried on a float64 copy of the model before anyone relies on it.

Being a unit is a statement about *all* weights, so it is tried at random ones (a trained model may hold dead units
that would hide a mistake) and on inputs with noise added (an example of zeros would hide one too). Three things must
hold, in evaluation and in training mode (of units that are not homogeneous, only the second):

- rescale: units scaled by random factors leave every output as it was;
- deaf: with a unit's ``out`` at zero, nothing about its ``into``, ``bias`` and ``carried`` reaches an output;
- mute: with its ``into`` and ``bias`` at zero, nothing about its ``out`` does.

And they must be able to fail: a group that no gradient reaches is refused, not believed. All groups are tried at
once; only when that fails are they tried apart, to find those that are wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathprox.copies import Inputs, seeded
from pathprox.slices import Slice
from pathprox.units import UnitGroup

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Largest difference relative to the largest output, by the lowest precision inside. A wrong group: about 1."""

Test = Callable[[Sequence[UnitGroup]], float]


class Proof:
    """Tries groups on a private copy of the model, which it spoils."""

    def __init__(self, model: nn.Module, inputs: Inputs, precision: torch.dtype, seed: int = 0) -> None:
        self.model = model.requires_grad_(True)
        self.tolerance = TOLERANCE.get(precision, 0.0)
        self.inputs = inputs
        self.given = inputs
        self.random = torch.Generator().manual_seed(seed)
        self.notes: list[str] = []
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._own = {name: t.detach().clone() for name, t in self._tensors.items()}
        self._point = self._own
        self._watched: list[Tensor] = []
        self._seed = seed
        self._obstacle = ""

    def run(self, groups: Sequence[UnitGroup]) -> dict[int, str]:
        """What was seen of each group that does not hold, by its place in ``groups``."""
        failed: dict[int, str] = {}
        if not groups or not self.tolerance:
            reason = "could not be tried: the model computes in less than float32, too coarsely to prove anything"
            return dict.fromkeys(range(len(groups)), reason)
        carried = {s.name for g in groups for s in g.carried}
        self._watched = [t for name, t in self.model.named_buffers() if name not in carried]
        reached: set[int] = set()
        points, in_training = 0, False
        for fresh in (True, False):
            self._draw(fresh)
            try:
                tried = self._try(groups, failed)
            except Exception as error:  # random weights may be outside what the model can bear
                if _out_of_memory(error):
                    raise
                tried = False
            if not tried:
                continue
            points += 1
            if len(reached) < len(groups):
                reached |= self._reached(groups)
            in_training = in_training or self._try_in_training(groups, failed)
        if points and not in_training:
            self.notes.append(f"not tried in training mode, where {self._obstacle}")
        if not points:
            return dict.fromkeys(range(len(groups)), "could not be tried: the outputs are random or not finite")
        for i in range(len(groups)):
            if i not in reached:
                failed.setdefault(i, "could not be tried: no gradient of the outputs reaches its weights")
        return failed

    def _try(self, groups: Sequence[UnitGroup], failed: dict[int, str], mode: str = "") -> bool:
        """All groups and all tests at once; apart only if that fails. False if the model is random or not finite.

        A group of a single unit is always tried by itself: without it, nothing else might be heard.
        """
        left = [i for i in range(len(groups)) if i not in failed]
        several = [i for i in left if len(groups[i]) > 1]
        batches = [[i] for i in left if len(groups[i]) == 1]
        if several and self._seen(self._everything, [groups[i] for i in several]) > self.tolerance:
            batches.append(several)
        if batches and not self._settled():
            return False
        tests = {"rescaling its units": self._rescale, "zeroing them": self._mute, "silencing them": self._deaf}
        for batch, (words, test) in itertools.product(batches, tests.items()):
            which = [i for i in batch if i not in failed and (groups[i].homogeneous or test == self._deaf)]
            for i, seen in self._search(groups, which, test).items():
                failed[i] = f"failed the proof: {words} changed the outputs by {seen:.1e}{mode}"
        return True

    def _try_in_training(self, groups: Sequence[UnitGroup], failed: dict[int, str]) -> bool:
        """The same in training mode; False if that could not be done at this point."""
        self.model.train()
        given, tried, problem = self.inputs, False, ""
        for attempt in (self._as_given, self._two_samples, self._norms_in_evaluation):
            attempt()
            try:
                tried = self._try(groups, failed, " in training mode")
                self._obstacle = "outputs are random even with one seed or not finite"
                break
            except Exception as error:  # batch norm refuses to train on one sample
                problem = problem or str(error)
                self._obstacle = f"the model fails on these inputs: {problem}"
        self.inputs = given
        self.model.eval()
        return tried

    def _as_given(self) -> None:
        pass

    def _two_samples(self) -> None:
        self.inputs = tree_map(self._doubled, self.inputs)

    def _doubled(self, x: object) -> object:
        if not (isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == 1):
            return x
        return torch.cat([x, x + self._normal(x) if x.is_floating_point() else x])

    def _norms_in_evaluation(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()

    def _search(self, groups: Sequence[UnitGroup], which: list[int], test: Test) -> dict[int, float]:
        """Which of these groups fail the test, and by how much."""
        if not which:
            return {}
        seen = self._seen(test, [groups[i] for i in which])
        if seen <= self.tolerance:
            return {}
        if len(which) == 1:
            return {which[0]: seen}
        middle = len(which) // 2
        parts = self._search(groups, which[:middle], test) | self._search(groups, which[middle:], test)
        return parts or dict.fromkeys(which, seen)

    def _seen(self, test: Test, groups: Sequence[UnitGroup]) -> float:
        try:
            return test(groups)
        except Exception as error:  # it does not even run any more
            if _out_of_memory(error):
                raise
            return math.inf

    def _everything(self, groups: Sequence[UnitGroup]) -> float:
        """Some units rescaled, some deaf, some mute."""
        nobody = [torch.zeros(len(g), dtype=torch.bool) for g in groups]
        deaf = [self._some(len(g)) for g in groups]
        mute = [~d & self._some(len(g)) if g.homogeneous else n for d, g, n in zip(deaf, groups, nobody, strict=True)]
        return self._compare_dead(groups, deaf, mute, rescale=True)

    def _rescale(self, groups: Sequence[UnitGroup]) -> float:
        with self._changed():
            before = self._outputs()
            for group in groups:
                self._rescale_(group, torch.ones(len(group), dtype=torch.bool))
            return _difference(before, self._outputs())

    def _rescale_(self, group: UnitGroup, which: Tensor) -> None:
        factor = torch.where(which, torch.exp(self._uniform(len(group)) * 2 - 1), 1.0)
        self._scale(group.into + group.bias, factor)
        self._scale(group.out, 1 / factor)

    def _deaf(self, groups: Sequence[UnitGroup]) -> float:
        dead = [self._some(len(g)) for g in groups]
        return self._compare_dead(groups, dead, [torch.zeros_like(mask) for mask in dead])

    def _mute(self, groups: Sequence[UnitGroup]) -> float:
        dead = [self._some(len(g)) for g in groups]
        return self._compare_dead(groups, [torch.zeros_like(mask) for mask in dead], dead)

    def _compare_dead(
        self, groups: Sequence[UnitGroup], deaf: list[Tensor], mute: list[Tensor], rescale: bool = False
    ) -> float:
        with self._changed():
            before = self._zeroed(groups, deaf, mute)
        if not _sound(before):
            return math.inf
        with self._changed():
            for group, d, m in zip(groups, deaf, mute, strict=True):
                if rescale and group.homogeneous:
                    self._rescale_(group, ~(d | m))
                self._shake(group.into + group.bias + group.carried, d)
                self._shake(group.out, m)
            return _difference(before, self._zeroed(groups, deaf, mute))

    def _zeroed(self, groups: Sequence[UnitGroup], deaf: list[Tensor], mute: list[Tensor]) -> list[Tensor]:
        """The outputs when nothing listens to the deaf units, and the mute ones say nothing."""
        for group, d, m in zip(groups, deaf, mute, strict=True):
            self._scale(group.out, torch.where(d, 0.0, 1.0))
            self._scale(group.into + group.bias, torch.where(m, 0.0, 1.0))
        return self._outputs()

    def _shake(self, slices: Iterable[Slice], which: Tensor) -> None:
        """Multiply these units' entries by random factors. A buffer may hold a variance, and keeps its sign."""
        for s in slices if which.any() else ():
            factor = torch.exp(self._uniform(len(which)) * 2 - 1)
            if isinstance(self._tensors[s.name], nn.Parameter):
                factor = torch.where(self._uniform(len(which)) < 0.5, -factor, factor)
            self._scale([s], torch.where(which, factor, 1.0))

    def _scale(self, slices: Iterable[Slice], factor: Tensor) -> None:
        for s in slices:
            tensor = self._tensors[s.name].detach()
            s.scale_(tensor, factor)

    def _reached(self, groups: Sequence[UnitGroup]) -> set[int]:
        """Groups of which some unit's out-going weights move the outputs."""
        try:
            gradients = self._gradients({s.name for g in groups for s in g.out})
        except RuntimeError:  # a model that runs but cannot be trained: ask each group by itself
            return {i for i, g in enumerate(groups) if self._heard(g)}
        return {i for i, g in enumerate(groups) if any(_any(s, gradients[s.name]) for s in g.out)}

    def _gradients(self, names: set[str]) -> dict[str, Tensor | None]:
        """Of a random combination of the outputs."""
        outputs = [o for o in self._outputs(grad=True) if o.requires_grad]
        if not outputs:
            return dict.fromkeys(names)
        total = torch.stack([(o * self._normal(o)).sum() for o in outputs]).sum()
        found = torch.autograd.grad(total, [self._tensors[n] for n in names], allow_unused=True)
        return dict(zip(names, found, strict=True))

    def _heard(self, group: UnitGroup) -> bool:
        with self._changed():
            before = self._outputs()
            self._scale(group.out, torch.exp(self._uniform(len(group))))
            return _difference(before, self._outputs()) > 100 * self.tolerance

    def _outputs(self, grad: bool = False) -> list[Tensor]:
        """What the model returns and, in training, what it writes into its buffers. They are left as they were."""
        buffers = [(t, t.clone()) for t in self.model.buffers()]
        args, kwargs = self.inputs
        with seeded(self._seed, self.model), torch.set_grad_enabled(grad):
            leaves = tree_leaves(self.model(*args, **kwargs))
        if self.model.training:
            leaves += self._watched
        outputs = [leaf if grad else leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # a write would spoil what autograd has saved of it
                    buffer.copy_(before)
        return outputs

    def _settled(self) -> bool:
        """Whether the outputs are finite, and the same when asked twice."""
        first, second = self._outputs(), self._outputs()
        return _sound(first) and _difference(first, second) <= self.tolerance

    def _draw(self, fresh: bool) -> None:
        """A point to try the statement at: fresh weights and noisy inputs, or the given inputs and noisy weights."""
        self._point = dict(self._own)
        for name, parameter in self._tensors.items():
            if isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
                own = self._own[name]
                size = torch.linalg.vector_norm(own) / math.sqrt(max(1, own.numel()))
                if own.numel() and size == 0:
                    size = 1 / torch.tensor(math.sqrt(own[0].numel() if own.dim() > 1 else 4.0))
                noise = self._normal(own)
                self._point[name] = noise.mul_(size) if fresh else noise.mul_(size / 2).add_(own)
        self.inputs = tree_map(self._noisy, self.given) if fresh else self.given
        self._seed += 1
        self._restore()
        self.model.eval()

    def _noisy(self, x: object) -> object:
        return x + self._normal(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    @contextmanager
    def _changed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(self._point[name])

    def _some(self, count: int) -> Tensor:
        """About a third of the units: at least one, and if there are two, not all."""
        chosen = self._uniform(count) < 1 / 3
        first, last = torch.randperm(count, generator=self.random)[[0, -1]].tolist()
        chosen[last], chosen[first] = False, True
        return chosen

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.random, dtype=torch.float64)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.random).to(like)  # float64 would be drawn far more slowly


def _out_of_memory(error: Exception) -> bool:
    """That says nothing about the units."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _sound(outputs: Sequence[Tensor]) -> bool:
    return bool(outputs) and all(bool(t.isfinite().all()) for t in outputs)


def _any(s: Slice, gradient: Tensor | None) -> bool:
    return gradient is not None and bool(s.square_sum(gradient).max() > 0)


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.numel() and not torch.equal(a, b):
            kind = torch.complex128 if a.is_complex() else torch.float64
            a, b = a.to(kind), b.to(kind)
            off = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30)
            worst = max(worst, math.inf if math.isnan(off) else off)
    return worst
