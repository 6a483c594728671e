"""The book kept while labels travel through the graph: which labels are one unit, which parameters they own, where
they end.

A label is the number of one output channel of one layer. An activation carries a *label tensor* of its own shape:
each entry names the label it scales with. Two labels stand for no unit: NONE, for entries that scale with nothing
(the model's input, whatever comes after the end of a unit), and ZERO, for entries that are exactly zero (padding) and
so agree with every label.

What happens to a label on its way is kept as a *bend*: LINEAR, BENT (ReLU and the like: still homogeneous), CURVED (any
other function of the entry: no longer homogeneous, but still the unit's own, so that it can be removed with it) and
MIXED (made of several entries of one label, as attention scores are).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NONE = 0
ZERO = -1
LINEAR, BENT, CURVED, MIXED = range(4)


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of the model, met as a value in the graph."""

    name: str
    shape: tuple[int, ...]
    """Its own, or that of a view of it."""
    kind: Literal["parameter", "buffer", "constant"]
    transposed: bool = False
    """Whether this is the transpose of a matrix; the shape is that of the matrix."""

    @property
    def trained(self) -> bool:
        return self.kind == "parameter"

    @property
    def free(self) -> bool:
        """Whether it is trained and can take part entry by entry."""
        return self.trained and not self.transposed

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it has more than one entry and broadcasts against ``shape`` without making it larger."""
        aligned = zip(reversed(self.shape), reversed(shape), strict=False)
        return self.numel > 1 and len(self.shape) <= len(shape) and all(a in (1, b) for a, b in aligned)


@dataclass(frozen=True)
class Claim:
    """At one operator, positions of a parameter along ``dims`` belong to ``labels``, as one of the kinds of slices."""

    kind: str
    parameter: Parameter
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    labels: Tensor


@dataclass(frozen=True)
class End:
    """Why a label is not a unit."""

    reason: str
    where: str
    heir: int | None = None
    """The label that it goes away with: what a batch norm starts in its place, or what it multiplies as a gate."""


@dataclass(frozen=True)
class Layer:
    """A layer that starts labels, for the table."""

    name: str
    labels: Tensor


class Book:
    def __init__(self) -> None:
        self._parent = [NONE]
        self._bend = [LINEAR]
        self.claims: list[Claim] = []
        self.layers: list[Layer] = []
        self.strangers: dict[str, str] = {}
        """Modules whose parameters no rule understands, and where they are used."""
        self._ends: dict[int, list[End]] = {}
        self._curved: dict[int, End] = {}
        self._roots: Tensor | None = None
        self._feeding: set[int] = set()

    def start(self, layer: str, count: int) -> Tensor:
        """New labels for the outputs of a layer."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        self._bend.extend([LINEAR] * count)
        labels = torch.arange(first, first + count)
        self.layers.append(Layer(layer, labels))
        return labels

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)
        if claim.kind == "out":
            self._feeding.update(claim.labels.unique().tolist())

    def find(self, label: int) -> int:
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label

    def roots(self, labels: Tensor) -> Tensor:
        """Each label's representative; ZERO stays."""
        if self._roots is None or len(self._roots) != len(self._parent):
            roots = torch.tensor(self._parent)
            while not torch.equal(roots, further := roots[roots]):
                roots = further
            self._roots = roots
        return torch.where(labels == ZERO, ZERO, self._roots[labels.clamp_min(0)])

    def end(self, labels: Tensor | Iterable[int], reason: str, where: str, heirs: Tensor | None = None) -> None:
        """These labels are no units, or not beyond this point."""
        labels = torch.as_tensor(labels)
        if heirs is not None:
            labels, heirs = compact(*torch.broadcast_tensors(labels, heirs))
            pairs = torch.stack([labels.flatten(), heirs.flatten()]).unique(dim=1).T.tolist()
        else:
            pairs = [[label, None] for label in compact(labels)[0].unique().tolist()]
        for label, heir in pairs:
            if label > NONE:
                self._ends.setdefault(label, []).append(End(reason, where, heir))

    def bend(self, labels: Tensor, how: int, reason: str = "", where: str = "") -> None:
        """These labels have passed a function that is not linear."""
        for label in compact(labels)[0].unique().tolist():
            if label > NONE:
                root = self.find(label)
                self._bend[root] = max(self._bend[root], how)
                if how >= CURVED:
                    self._curved.setdefault(label, End(reason, where))

    def bends(self, labels: Tensor) -> Tensor:
        """How far each entry is bent; broadcasts like the labels."""
        (labels,) = compact(labels)
        values, inverse = labels.unique(return_inverse=True)
        return torch.tensor([self._bend[self.find(v)] if v > NONE else LINEAR for v in values.tolist()])[inverse]

    def feeds(self, labels: Tensor) -> Tensor:
        """Which labels already feed a weight."""
        feeding = self.roots(torch.tensor(sorted(self._feeding), dtype=labels.dtype))
        return torch.isin(self.roots(labels), feeding[feeding > NONE])

    def ends(self) -> dict[int, list[End]]:
        """The ends of each representative. What has become one with its heir has not ended, it is curved."""
        gathered: dict[int, list[End]] = {}
        for label, ends in self._ends.items():
            root = self.find(label)
            others = [e for e in ends if e.heir is None or self.find(e.heir) != root]
            if others:
                gathered.setdefault(root, []).extend(others)
            if len(others) < len(ends):
                self._curved.setdefault(label, ends[0])
        return gathered

    def curved(self) -> dict[int, End]:
        """For each representative that is not homogeneous, why. Ask after `ends`."""
        return {self.find(label): end for label, end in reversed(self._curved.items())}

    def unify(self, a: Tensor, b: Tensor, reason: str, where: str) -> Tensor:
        """Entry by entry ``a`` and ``b`` become one unit, or end where the other is NONE; returns the common labels."""
        a, b = torch.broadcast_tensors(a, b)
        shape = a.shape
        a, b = compact(a, b)
        differ = (a != b) & (a != ZERO) & (b != ZERO)
        if differ.any():
            count = len(self._parent)
            for pair in (a[differ] * count + b[differ]).unique().tolist():
                x, y = divmod(pair, count)
                if x == NONE or y == NONE:
                    self.end([x, y], reason, where)
                else:
                    self._join(self.find(x), self.find(y))
        common = torch.where(a == ZERO, b, a)
        return torch.where((a == NONE) | (b == NONE), NONE, common).expand(shape)

    def _join(self, root: int, other: int) -> None:
        self._parent[root] = other
        self._bend[other] = max(self._bend[root], self._bend[other])
        self._roots = None

    def reduce(self, labels: Tensor, dims: Iterable[int], reason: str, where: str) -> Tensor:
        """Everything along ``dims`` becomes one unit; those dimensions are kept with size 1."""
        for d in sorted({d % labels.dim() for d in dims}):
            if labels.stride(d) == 0 or labels.shape[d] == 1:
                labels = labels.narrow(d, 0, 1)
                continue
            top = labels.amax(d, keepdim=True)  # ZERO only if all are ZERO, NONE only if there is no label
            self.unify(labels, top, reason, where)
            labels = torch.where((labels == NONE).any(d, keepdim=True), NONE, top)
        return labels

    @staticmethod
    def common(labels: Tensor, dims: Iterable[int]) -> Tensor:
        """The label along ``dims`` where it is one and the same, else NONE; nothing is merged. Keeps the dimensions."""
        for d in dims:
            top = labels.amax(d, keepdim=True)
            labels = torch.where(((labels == top) | (labels == ZERO)).all(d, keepdim=True), top, NONE)
        return labels


def compact(*tensors: Tensor) -> list[Tensor]:
    """The same tensors without the repetitions that broadcasting made in all of them."""
    index = tuple(
        slice(0, 1) if all(t.stride(d) == 0 for t in tensors) else slice(None) for d in range(tensors[0].dim())
    )
    return [t[index] for t in tensors]
