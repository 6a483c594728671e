"""Trying a removal on copies before anyone relies on it."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from pathprox.copies import Inputs, copy_of, double, evaluating, exact, fit, seeded, shaken
from pathprox.dead import silence_
from pathprox.units import UnitGroup, Units

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference of the outputs, relative to the largest output, that still counts as the same function."""


class Change(Protocol):
    """Units that go, and how."""

    @property
    def groups(self) -> Sequence[UnitGroup]: ...
    @property
    def dead(self) -> Sequence[Tensor]: ...
    def apply(self, model: nn.Module) -> None: ...


class Trial:
    """Compares a model with what a removal makes of it: at its own weights, and at random ones in float64.

    The first shows that the function is the same. The second shows that this is no accident of small weights: with
    the dead units silenced, whatever the others are, the smaller model computes the same.
    """

    def __init__(self, model: nn.Module, units: Units) -> None:
        if units.inputs is None:
            raise ValueError("these units were not made by find_units, so there are no example inputs to compare on")
        self.model = copy_of(model)
        self.inputs = fit(units.inputs, model)
        self.before = _run(self.model, self.inputs)
        self.shapes_tell = _shapes(self.model, self.inputs) is None
        self.other, given = double(model, units.inputs)
        self.noisy = shaken(self.other, given)
        self.noise_tells = all(bool(t.isfinite().all()) for t in _run(self.other, self.noisy) if t.is_floating_point())

    def problem(self, change: Change) -> str | None:
        """What is wrong with the smaller model, if anything."""
        return self._at_own(change) or (self._at_random(change) if self.noise_tells else None)

    def _at_own(self, change: Change) -> str | None:
        with _undone(self.model):
            change.apply(self.model)
            problem = _shapes(self.model, self.inputs) if self.shapes_tell else None
            return problem or _compare(self.before, self.model, self.inputs)

    def _at_random(self, change: Change) -> str | None:
        with _undone(self.other):
            tensors = dict(self.other.named_parameters())
            touched = [(g, mask) for g, mask in zip(change.groups, change.dead, strict=True) if mask.any()]
            for name in {s.name for g, _ in touched for s in g.into + g.bias + g.out}:
                tensors[name].data = tensors[name].data.clone()
            for group, mask in touched:
                silence_(group, mask, tensors)
            before = _run(self.other, self.noisy)
            change.apply(self.other)
            problem = _compare(before, self.other, self.noisy)
        return problem and f"at random weights {problem}"


def difference(model: nn.Module, small: nn.Module, units: Units) -> str | None:
    """What tells the two apart on the example inputs, if anything."""
    if units.inputs is None:
        return None
    return _compare(_run(model, fit(units.inputs, model)), small, fit(units.inputs, small))


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's tensors have the data they had, and its modules their whole numbers."""
    tensors = [(t, t.data) for t in (*model.parameters(), *model.buffers())]
    numbers = [(m, {k: v for k, v in vars(m).items() if type(v) is int}) for m in model.modules()]
    try:
        yield
    finally:
        for tensor, data in tensors:
            tensor.data = data
        for module, values in numbers:
            vars(module).update(values)


def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What a model returns, as far as it is tensors."""
    with evaluating(model), seeded(0, model), exact():
        return [leaf for leaf in tree_leaves(model(*inputs[0], **inputs[1])) if isinstance(leaf, Tensor)]


def _shapes(model: nn.Module, inputs: Inputs) -> str | None:
    """Whether the shapes fit together, without computing anything.

    That is quick, and sizes that do not fit may do worse in a compiled kernel than raise an error.
    """
    try:
        with evaluating(model), _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model(*inputs[0], **inputs[1])
    except Exception as error:
        return _failure(error)
    return None


def _failure(error: Exception) -> str:
    return f"at the smaller size the model fails ({_line(error)}): {error}"


@contextmanager
def _quiet() -> Iterator[None]:
    """torch writes the shapes that do not fit to its log, at length."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _line(error: Exception) -> str:
    """The line of the model's source that an error comes from; one of torch's if the model is all torch's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    layers = [f for f in frames if f"{os.sep}nn{os.sep}" in f.filename]
    own = [f for f in frames if not f.filename.startswith(_TORCH)] or layers or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else "no line known"


_TORCH = os.path.dirname(torch.__file__)


def _compare(before: Sequence[Tensor], small: nn.Module, inputs: Inputs) -> str | None:
    try:
        after = _run(small, inputs)
    except Exception as error:
        return _failure(error)
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return f"an output of shape {tuple(a.shape)} became {tuple(b.shape)}"
        limit = TOLERANCE.get(a.dtype, 1e-2) * float(a.abs().max()) if a.is_floating_point() and a.numel() else 0.0
        if a.numel() and not float((a - b).abs().max()) <= limit:
            return f"the outputs changed by {float((a - b).abs().max()):.1e}"
    return None
