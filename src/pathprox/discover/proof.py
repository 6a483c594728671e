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

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathprox.copies import Inputs
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

    def run(self, groups: Sequence[UnitGroup]) -> dict[int, str]:
        """What was seen of each group that does not hold, by its place in ``groups``."""
        failed: dict[int, str] = {}
        if not groups or not self.tolerance:
            reason = "could not be tried: the model computes in less than float32, too coarsely to prove anything"
            return dict.fromkeys(range(len(groups)), reason)
        carried = {s.name for g in groups for s in g.carried}
        self._watched = [t for name, t in self.model.named_buffers() if name not in carried]
        reached: set[int] = set()
        points = 0
        for fresh in (True, False):
            self._draw(fresh)
            try:
                settled = self._settled()
            except Exception:  # random weights may be outside what the model can bear
                settled = False
            if not settled:
                continue
            points += 1
            reached |= self._reached(groups)
            self._try(groups, failed)
            self._try_in_training(groups, failed)
        if not points:
            return dict.fromkeys(range(len(groups)), "could not be tried: the outputs are random or not finite")
        for i in range(len(groups)):
            if i not in reached:
                failed.setdefault(i, "could not be tried: no gradient of the outputs reaches its weights")
        return failed

    def _try(self, groups: Sequence[UnitGroup], failed: dict[int, str], mode: str = "") -> None:
        tests = {"rescaling its units": self._rescale, "zeroing them": self._mute, "silencing them": self._deaf}
        for words, test in tests.items():
            left = [i for i, g in enumerate(groups) if i not in failed and (g.homogeneous or test == self._deaf)]
            for i, seen in self._search(groups, left, test).items():
                failed[i] = f"failed the proof: {words} changed the outputs by {seen:.1e}{mode}"

    def _try_in_training(self, groups: Sequence[UnitGroup], failed: dict[int, str]) -> None:
        self.model.train()
        given, problem = self.inputs, ""
        for attempt in (self._as_given, self._two_samples, self._norms_in_evaluation):
            attempt()
            try:
                settled = self._settled()
            except Exception as error:  # batch norm refuses to train on one sample
                problem = problem or str(error)
                continue
            if settled:
                self._try(groups, failed, " in training mode")
            else:
                self._note("not tried in training mode, where outputs are random even with one seed or not finite")
            break
        else:
            self._note(f"not tried in training mode, where the model fails on these inputs: {problem}")
        self.inputs = given
        self.model.eval()

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

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _search(self, groups: Sequence[UnitGroup], which: list[int], test: Test) -> dict[int, float]:
        """Which of these groups fail the test, and by how much."""
        if not which:
            return {}
        try:
            seen = test([groups[i] for i in which])
        except Exception:  # it does not even run any more
            seen = math.inf
        if seen <= self.tolerance:
            return {}
        if len(which) == 1:
            return {which[0]: seen}
        middle = len(which) // 2
        parts = self._search(groups, which[:middle], test) | self._search(groups, which[middle:], test)
        return parts or dict.fromkeys(which, seen)

    def _rescale(self, groups: Sequence[UnitGroup]) -> float:
        with self._changed():
            before = self._outputs()
            for group in groups:
                factor = torch.exp(self._uniform(len(group)) * 2 - 1)
                self._scale(group.into + group.bias, factor)
                self._scale(group.out, 1 / factor)
            return _difference(before, self._outputs())

    def _deaf(self, groups: Sequence[UnitGroup]) -> float:
        dead = [self._some(len(g)) for g in groups]
        return self._compare_dead(groups, dead, zero=("out",), shake=("into", "bias", "carried"))

    def _mute(self, groups: Sequence[UnitGroup]) -> float:
        dead = [self._some(len(g)) for g in groups]
        return self._compare_dead(groups, dead, zero=("into", "bias"), shake=("out",))

    def _compare_dead(
        self, groups: Sequence[UnitGroup], dead: list[Tensor], zero: tuple[str, ...], shake: tuple[str, ...]
    ) -> float:
        def zeroed() -> list[Tensor]:
            for group, off in zip(groups, dead, strict=True):
                for kind in zero:
                    self._scale(getattr(group, kind), torch.where(off, 0.0, 1.0))
            return self._outputs()

        with self._changed():
            before = zeroed()
        with self._changed():
            for group, off in zip(groups, dead, strict=True):
                for s in (s for kind in shake for s in getattr(group, kind)):
                    factor = torch.exp(self._uniform(len(off)) * 2 - 1)
                    if isinstance(
                        self._tensors[s.name], nn.Parameter
                    ):  # a buffer may hold a variance, and keeps its sign
                        factor = torch.where(self._uniform(len(off)) < 0.5, -factor, factor)
                    self._scale([s], torch.where(off, factor, 1.0))
            return _difference(before, zeroed())

    def _scale(self, slices: Iterable[Slice], factor: Tensor) -> None:
        for s in slices:
            tensor = self._tensors[s.name].detach()
            s.scale_(tensor, factor.to(tensor.device))

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
        with _seeded(self._seed, self._tensors.values()), torch.set_grad_enabled(grad):
            leaves = tree_leaves(self.model(*args, **kwargs))
        if self.model.training:
            leaves += self._watched
        outputs = [leaf if grad else leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return outputs

    def _settled(self) -> bool:
        """Whether the outputs are finite, and the same when asked twice."""
        first, second = self._outputs(), self._outputs()
        finite = all(bool(t.isfinite().all()) for t in first)
        return bool(first) and finite and _difference(first, second) <= self.tolerance

    def _draw(self, fresh: bool) -> None:
        """A point to try the statement at: fresh weights and noisy inputs, or the given inputs and noisy weights."""
        self._point = {name: t.clone() for name, t in self._own.items()}
        for name, parameter in self._tensors.items():
            if isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
                own = self._own[name]
                size = own.square().mean().sqrt()
                if size == 0:
                    size = 1 / torch.tensor(math.sqrt(max(1, own[0].numel()) if own.dim() > 1 else 4.0))
                noise = self._normal(own) * size
                self._point[name] = noise if fresh else own + noise / 2
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
        """About half of the units, and at least one."""
        chosen = self._uniform(count) < 0.5
        chosen[int(torch.randint(count, (), generator=self.random))] = True
        return chosen

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.random, dtype=torch.float64)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.random, dtype=torch.float64).to(like)


@contextmanager
def _seeded(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """The same random numbers every time, from torch, Python and numpy; their states are left as they were."""
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    python, array = random.getstate(), numpy.random.get_state()  # noqa: NPY002  (the model's choice, not ours)
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)  # noqa: NPY002


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
