"""Cutting units out of a model: which entries of a parameter are kept, and what its module has to be told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pathprox.slices import Slice, slot
from pathprox.units import UnitGroup


@dataclass(frozen=True)
class Cut:
    """What is kept of one parameter or buffer."""

    keep: Tensor
    """True for the entries that stay, in the parameter's shape."""
    shape: tuple[int, ...]
    """The new shape."""
    blocks: int
    """The groups that are left of a grouped convolution; 1 for anything else."""
    grouped: bool = False
    """Whether it is a grouped convolution's weight: a rectangle in each group, not a rectangle."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The kept part of the parameter, or of a tensor of its shape such as its momentum."""
        new = tensor.detach()
        if self.grouped:
            new = new[self.keep.to(tensor.device)].view(self.shape)
        for d, slab in enumerate(() if self.grouped else self._slabs):
            new = new if slab.all() else new.index_select(d, slab.nonzero().flatten().to(tensor.device))
        last = (
            tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        return new.contiguous(memory_format=torch.channels_last) if last else new

    @cached_property
    def _slabs(self) -> list[Tensor]:
        return _slabs(self.keep)


class UnevenError(ValueError):
    """The dead units do not form whole slabs of a parameter."""


def plan_cuts(model: nn.Module, groups: Sequence[UnitGroup], dead: Sequence[Tensor]) -> dict[str, Cut]:
    """What to keep of each parameter and buffer when these units go."""
    keep: dict[str, Tensor] = {}
    for group, mask in zip(groups, dead, strict=True):
        for s in group.slices if mask.any() else ():
            shape = getattr(*slot(model, s.name)).shape
            there = s.expand(~mask, fill=1).expand(s.shape).reshape(shape)
            keep[s.name] = keep.get(s.name, torch.ones(shape, dtype=torch.bool)) & there
    return {name: _cut(model, name, mask) for name, mask in keep.items() if not mask.all()}


def _cut(model: nn.Module, name: str, keep: Tensor) -> Cut:
    """The kept entries as a smaller tensor. A grouped convolution may lose whole groups, or as many in each."""
    layer, leaf = slot(model, name)
    groups = layer.groups if isinstance(layer, nn.modules.conv._ConvNd) and leaf == "weight" else 1
    blocks = [block for block in keep.view(groups, -1, *keep.shape[1:]) if block.any()] if groups > 1 else [keep]
    sizes = {_sizes(block) for block in blocks}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        what = (
            "do not go from all groups of this grouped convolution alike" if groups > 1 else "are not whole slabs of it"
        )
        raise UnevenError(f"{name} cannot be cut: the dead units {what}")
    return Cut(keep, (size[0] * len(blocks), *size[1:]), len(blocks), groups > 1)


def _sizes(keep: Tensor) -> tuple[int, ...] | None:
    """The shape of what is kept, if it is a rectangle: some indices of each dimension, in every combination."""
    slabs = _slabs(keep)
    sizes = tuple(int(slab.sum()) for slab in slabs)
    return sizes if int(keep.sum()) == torch.Size(sizes).numel() else None


def _slabs(keep: Tensor) -> list[Tensor]:
    """For each dimension the indices of which something is kept."""
    dims = range(keep.dim())
    return [keep.any(tuple(e for e in dims if e != d)) if keep.dim() > 1 else keep for d in dims]


def apply_cuts(model: nn.Module, cuts: dict[str, Cut]) -> None:
    """Cut parameters and buffers in place (they stay the same objects), and let the modules say their new sizes."""
    for name, cut in cuts.items():
        layer, leaf = slot(model, name)
        tensor: Tensor = getattr(layer, leaf)
        old = tensor.shape
        gradient = tensor.grad
        _set(tensor, cut(tensor))
        if gradient is not None:
            tensor.grad = cut(gradient)
        if cut.grouped:
            setattr(layer, "groups", cut.blocks)  # noqa: B010  (mypy knows no groups of a Module)
        if not _refresh(layer):
            resize_attributes(layer, dict(zip(old, tensor.shape, strict=True)), whole_numbers(layer))


def _set(tensor: Tensor, new: Tensor) -> None:
    """Give a tensor other data of another shape.

    The detour over another type makes autograd forget the node that accumulates the gradient: as long as an old loss is
    alive it would be used again, and insist on the old shape.
    """
    tensor.grad = None
    other = torch.float16 if tensor.dtype is not torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = new


def whole_numbers(module: nn.Module) -> list[str]:
    """The whole numbers that a module keeps as attributes, such as ``num_heads``."""
    return [name for name, value in vars(module).items() if type(value) is int and not name.startswith("_")]


def resize_attributes(module: nn.Module, sizes: dict[int, int], names: Iterable[str]) -> None:
    """Let old sizes become new ones in these attributes."""
    for name in names:
        value = getattr(module, name, None)
        if type(value) is int and value in sizes:
            setattr(module, name, sizes[value])


def _refresh(module: nn.Module) -> bool:
    """Let the attributes of torch's own layers say their new size; False for other modules."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[0], module.weight.shape[1] * module.groups
        module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        sizes = [len(t) for t in (module.weight, module.running_mean) if isinstance(t, Tensor)]
        module.num_features = sizes[0] if sizes else module.num_features
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    else:
        return isinstance(module, nn.MultiheadAttention)
    return True


def cut_group(group: UnitGroup, cuts: dict[str, Cut], kept: Tensor) -> UnitGroup:
    """The group as it is in the smaller model; ``kept`` are the units that stay."""

    def smaller(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        return tuple(cut_slice(s, cuts.get(s.name), kept) for s in slices)

    into, bias, out, carried = map(smaller, (group.into, group.bias, group.out, group.carried))
    return replace(group, into=into, bias=bias, out=out, carried=carried)


def cut_slice(s: Slice, cut: Cut | None, kept: Tensor) -> Slice:
    """The same slice of the smaller parameter, with the units that stay numbered anew."""
    shape, owner = s.shape, s.owner
    if cut is not None:
        shape = _view(s.shape, cut)
        owner = owner.view([n if d in s.dims else 1 for d, n in enumerate(s.shape)]).expand(s.shape)
        owner = owner.flatten()[cut.keep.flatten()].view(shape)
        owner = owner[tuple(slice(None) if d in s.dims else 0 for d in range(len(shape)))].flatten()
    count = int(kept.sum())
    numbers = torch.full((s.units + 1,), -1)
    numbers[:-1][kept] = torch.arange(count)
    return Slice(s.name, shape, s.dims, numbers[owner], count)


def _view(old: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """The smaller parameter in the view that the slice has of it: groups split off, or another shape."""
    if len(old) > 1 and old[0] > 1 and old[0] * old[1] == cut.keep.shape[0] and old[2:] == cut.keep.shape[1:]:
        return (cut.blocks, cut.shape[0] // cut.blocks, *cut.shape[1:])
    sizes = _sizes(cut.keep.reshape(old))
    if sizes is None:
        raise UnevenError("a parameter that is used in another shape cannot be cut in that shape")
    return sizes
