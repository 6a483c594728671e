"""Units that are only a constant: w is zero, but not the bias, so that they say the same on every input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathprox.copies import Inputs, copy_of, evaluating, shaken
from pathprox.dead import gone
from pathprox.slices import Slice
from pathprox.units import UnitGroup


@torch.no_grad()
def fold_constants_(model: nn.Module, groups: Sequence[UnitGroup], inputs: Inputs) -> int:
    """Move units that are only a constant into the biases of the layers they feed, and let those layers ignore them.

    Only where that is exact: the layer is a linear or convolution layer with a bias, without zero padding, and the
    unit arrives there as one number, in every position, on every input, whatever the other weights are. Returns how
    many there were.
    """
    idle = [(g, _idle(model, g)) for g in groups]
    return sum(_fold_(model, g, still, inputs) for g, still in idle if still.any())


def _idle(model: nn.Module, group: UnitGroup) -> Tensor:
    """Units whose w is zero and that are still heard."""
    there = {s.name: model.get_parameter(s.name) != 0 for s in group.into + group.out}
    return gone(group.into, there) & ~gone(group.out, there)


def _fold_(model: nn.Module, group: UnitGroup, idle: Tensor, inputs: Inputs) -> int:
    """Fold those of the idle units that can be; returns how many."""
    readers = _readers(model, group)
    if not readers:
        return 0
    constants = _constants(model, group, idle, [layer for layer, _ in readers], inputs)
    folded = 0
    for unit in idle.nonzero().flatten().tolist():
        places = [(s.owner == unit).nonzero().flatten() for _, s in readers]
        values = [constants[layer][place] for (layer, _), place in zip(readers, places, strict=True)]
        if any(bool(v.isnan().any()) for v in values):
            continue
        if any(bool(v.any()) and not _takes(layer) for v, (layer, _) in zip(values, readers, strict=True)):
            continue
        for (layer, _), place, value in zip(readers, places, values, strict=True):
            columns = layer.weight.detach()[:, place.to(layer.weight.device)]
            if value.any():
                pull = columns.double().flatten(2).sum(2) if columns.dim() > 2 else columns.double()
                layer.bias.add_((pull @ value.to(pull)).to(layer.bias))
            layer.weight.detach()[:, place.to(layer.weight.device)] = 0
        folded += 1
    return folded


def _readers(model: nn.Module, group: UnitGroup) -> list[tuple[Any, Slice]]:
    """The layers that the units feed, if all are plain linear and convolution layers; else none."""
    found = []
    for s in group.out:
        layer: Any = model.get_submodule(s.layer) if s.name.endswith(".weight") else None
        if (
            type(layer) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
            or s.dims != (1,)
            or s.shape != layer.weight.shape
        ):
            return []
        found.append((layer, s))
    return found


def _takes(layer: Any) -> bool:
    """Whether a constant can be put into the layer's bias: it has one, and no zeros are padded in beside it."""
    padded = layer.padding_mode == "zeros" and any(_padding(layer)) if not isinstance(layer, nn.Linear) else False
    return layer.bias is not None and not padded


def _padding(layer: Any) -> list[int]:
    if isinstance(layer.padding, str):
        return [0] if layer.padding == "valid" else [k - 1 for k in layer.kernel_size]
    return list(layer.padding)


def _constants(
    model: nn.Module, group: UnitGroup, idle: Tensor, layers: Sequence[Any], inputs: Inputs
) -> dict[Any, Tensor]:
    """What each input channel of the layers always is; NaN where it varies."""
    other = copy_of(model)
    shake = shaken(other, inputs, fresh=True)
    for s in group.into:  # the units in question stay silent
        weight = other.get_parameter(s.name).detach()
        s.scale_(weight, torch.where(idle, 0.0, 1.0))
    twins = [other.get_submodule(name) for layer in layers for name, m in model.named_modules() if m is layer]
    given, varied, elsewhere = _seen(model, layers, inputs), _seen(model, layers, shake), _seen(other, twins, shake)
    found = {}
    for layer, twin in zip(layers, twins, strict=True):
        if layer not in given:  # its weight is used, but it is not called
            found[layer] = torch.full((layer.weight.shape[1],), torch.nan)
            continue
        value = given[layer][0]
        steady = (given[layer][1] == value) & (varied[layer][0] == value) & (varied[layer][1] == value)
        steady &= elsewhere[twin][0] == elsewhere[twin][1]
        found[layer] = torch.where(steady, value, torch.nan).double().cpu()
    return found


def _seen(model: nn.Module, layers: Sequence[Any], inputs: Inputs) -> dict[Any, tuple[Tensor, Tensor]]:
    """The smallest and the largest value of every input channel of these layers."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def look(layer: Any, args: tuple[Tensor, ...]) -> None:
        channel = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.dim()
        rows = args[0].movedim(channel, 0).flatten(1)
        low, high = rows.amin(1), rows.amax(1)
        if layer in seen:
            low, high = torch.minimum(low, seen[layer][0]), torch.maximum(high, seen[layer][1])
        seen[layer] = low, high

    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with evaluating(model):
            model(*inputs[0], **inputs[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen
