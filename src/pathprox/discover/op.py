"""One call in the graph, as the rules in `operators` see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pathprox.discover.labels import BENT, CURVED, MIXED, NONE, ZERO, Book, Claim, Parameter, compact

Value = Any
"""A label tensor, a tuple of them, a `Parameter`, or a plain argument (number, list, None)."""

MIXES = "mixes the unit with something that is not one"


@dataclass
class Op:
    """One call in the graph, as its rule sees it."""

    node: fx.Node
    book: Book
    name: str
    where: str
    """file.py:line in the model's own source."""
    module: str
    """The module whose forward makes the call."""
    understood: set[str] = field(default_factory=set)
    """Parameters whose use here is accounted for. Any other use of a parameter makes it unfit for units."""

    @property
    def floating(self) -> bool:
        """Whether the output is a tensor of floating-point numbers."""
        value = self.node.meta.get("val")
        return isinstance(value, Tensor) and value.is_floating_point()

    @property
    def shape(self) -> torch.Size:
        """The shape of the (first) output."""
        value = self.node.meta["val"]
        first = value[0] if isinstance(value, tuple | list) else value
        return torch.Size(first.shape)

    @property
    def place(self) -> str:
        """Where in the model this is, for people."""
        return self.where or self.module or self.name

    def claim(
        self, kind: str, parameter: Parameter, labels: Tensor, shape: tuple[int, ...], dims: tuple[int, ...]
    ) -> None:
        self.understood.add(parameter.name)
        self.book.claim(Claim(kind, parameter, shape, dims, labels.flatten()))

    def reduce(self, labels: Tensor, dims: list[int], how: str) -> Tensor:
        return self.book.reduce(labels, dims, f"{self.name} {how}", self.where)

    def channels(self, labels: Tensor, channel: int) -> Tensor:
        """One label for each channel; what shares a channel becomes one unit."""
        others = [d for d in range(labels.dim()) if d != channel % labels.dim()]
        return self.reduce(labels, others, MIXES).flatten()

    def spread(self, labels: Tensor, channel: int) -> Tensor:
        """One label a channel, over the whole output."""
        shape = [1] * len(self.shape)
        shape[channel] = -1
        return labels.view(shape).expand(self.shape)

    def stop(self, values: Value, reason: str | None = None) -> None:
        """The units in these values end here."""
        reason = reason or f"{self.name} is not known to keep a unit's scale"
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, Tensor):
                self.book.end(value, reason, self.where)
            elif isinstance(value, tuple | list):
                self.stop(value, reason)

    def bend(self, labels: Tensor) -> Tensor:
        """A function of each entry by itself that is homogeneous but not linear."""
        self.book.bend(labels, BENT)
        return labels

    def curve(self, labels: Tensor, reason: str | None = None, how: int = CURVED) -> Tensor:
        """A function of the unit that is not homogeneous. It need not keep zeros."""
        self.book.bend(labels, how, reason or f"{self.name} is not homogeneous", self.where)
        return self.filled(labels)

    @staticmethod
    def filled(labels: Tensor) -> Tensor:
        """Where there was exactly zero there is now something that scales with no unit."""
        (few,) = compact(labels)
        return torch.where(few == ZERO, NONE, few).expand(labels.shape)

    def product(self, x: Tensor, y: Tensor, entrywise: bool) -> Tensor:
        """Labels of a product: the more linear factor is the unit, and the other, its gate, goes away with it.

        Where neither is more linear an entrywise product takes the one that feeds a weight elsewhere (a gate could not,
        and still go away with the unit), or else the first: both are right. A product of matrices, as that of queries
        and keys, makes one unit of the two.
        """
        x, y = torch.broadcast_tensors(x, y)
        shape = x.shape
        x, y = compact(x, y)
        both = (x > NONE) & (y > NONE)
        same = both & (self.book.roots(x) == self.book.roots(y))
        gate_x, gate_y = self.book.bends(x), self.book.bends(y)
        tie = both & ~same & (gate_x == gate_y)
        label = torch.where(both & (gate_x > gate_y), y, torch.where(x == NONE, y, x))
        if entrywise and tie.any():
            label = torch.where(tie & self.book.feeds(y) & ~self.book.feeds(x), y, label)
        reason = f"{self.name} multiplies two units"
        if same.any():
            self.book.bend(
                x[same], CURVED if entrywise else MIXED, f"{self.name} multiplies the unit by itself", self.where
            )
        if not entrywise and tie.any():
            self.book.unify(x[tie], y[tie], reason, self.where)
            self.book.bend(x[tie], MIXED, reason, self.where)
        gated = both & ~same & (torch.tensor(entrywise) | ~tie)
        if gated.any():
            gate = torch.where(label == x, y, x)
            reason = "it multiplies other units, as a gate"
            self.book.end(gate[gated], reason, self.where, heirs=label[gated])
        return torch.where((x == ZERO) | (y == ZERO), ZERO, label).expand(shape)

    def plain(self, value: Value) -> Value:
        """A parameter or constant that is used like an activation scales with no unit."""
        if not isinstance(value, Parameter):
            return value
        return torch.tensor(NONE).expand(value.shape[::-1] if value.transposed else value.shape)

    def nothing(self) -> Value:
        """Outputs that scale with no unit."""
        return none_like(self.node.meta.get("val"))

    def first(self, labels: Tensor) -> Value:
        """The labels of the first output; further ones (indices, statistics) scale with no unit."""
        rest = self.nothing()
        return (labels, *rest[1:]) if isinstance(rest, tuple) else labels

    def beside(self, kind: str, x: Tensor, parameter: Parameter) -> None:
        """The parameter lies along the activation: each of its entries belongs to the unit it meets."""
        aligned = (1,) * (x.dim() - len(parameter.shape)) + parameter.shape
        over = [d for d, size in enumerate(aligned) if size == 1]
        if kind == "carried":  # what several units share does not scale and belongs to none
            labels = self.book.common(x, over)
        else:
            labels = self.reduce(x, over, f"with {parameter.name} spans several units")
        dims = tuple(d for d, size in enumerate(aligned) if size > 1)
        self.claim(kind, parameter, labels, aligned, dims)

    def owner(self, weight: Value) -> str:
        """The module that holds a weight."""
        if isinstance(weight, Parameter):
            return weight.name.rpartition(".")[0] or weight.name
        return self.module or f"{self.name} ({self.where})"


def none_like(value: Any) -> Value:
    if isinstance(value, tuple | list):
        return tuple(none_like(v) for v in value)
    return torch.tensor(NONE).expand(value.shape) if isinstance(value, torch.Tensor) else value
