"""What shrinking has brought: units, parameters, work, bytes and time before and after, and what it changed."""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from pathprox.copies import evaluating, fit, seeded
from pathprox.discover import find_units
from pathprox.text import shortened, table
from pathprox.units import Units

SECONDS = 2.0
"""How long the two models are timed; at least three calls each, however long they take."""
REPEATS = 200
"""The most calls of each model that are timed."""


@dataclass(frozen=True)
class GroupSize:
    """How many units a group has; None in a model without such a group."""

    into: tuple[str, ...]
    """The layers that feed the units."""
    out: tuple[str, ...]
    """The layers that the units feed."""
    before: int | None
    after: int | None


@dataclass(frozen=True)
class Cost:
    """What a model costs."""

    parameters: int
    macs: int
    """Multiply-adds of the matrix products and convolutions in one call on the inputs, without recurrent layers."""
    file_bytes: int
    """The size of its state dict as torch.save writes it."""
    latency: float
    """Seconds that a call on the inputs takes in evaluation mode: the median."""


@dataclass(frozen=True)
class Difference:
    """How far two models' outputs are apart; inf where only one of them is a number."""

    absolute: float
    """The largest difference."""
    relative: float
    """The largest difference relative to the largest absolute value of its output."""


@dataclass(frozen=True)
class Report:
    """A model and a smaller one, compared."""

    groups: tuple[GroupSize, ...]
    before: Cost
    after: Cost
    difference: Difference
    """On the inputs."""
    noisy_difference: Difference
    """On the inputs with noise as large as their spread; only floating-point inputs get it."""

    @property
    def ratios(self) -> dict[str, float]:
        """For every cost, how many times less it has become."""
        before, after = asdict(self.before), asdict(self.after)
        return {name: _ratio(before[name], after[name]) for name in before}

    def to_dict(self) -> dict[str, Any]:
        """The tables, for machines; None for a number that is not finite."""

        def finite(x: Any) -> Any:
            return None if isinstance(x, float) and not math.isfinite(x) else x

        found: dict[str, Any] = tree_map(finite, asdict(self) | {"ratios": self.ratios})
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        before, after = sum(g.before or 0 for g in self.groups), sum(g.after or 0 for g in self.groups)
        sizes = [(_count(g.before), _count(g.after), shortened(g.into), shortened(g.out)) for g in self.groups]
        ratios = [f"{ratio:.2f}" for ratio in self.ratios.values()]
        width = max(map(len, ratios))
        costs = [
            (name, str(was), str(now), ratio.rjust(width))
            for (name, was, now), ratio in zip(self._costs(), ratios, strict=True)
        ]
        given, noisy = self.difference, self.noisy_difference
        return "\n".join(
            [
                f"{after} of {before} units left, in {len(self.groups)} groups",
                *table(("before", "after", "fed by (w)", "feeding (v)"), sizes),
                "",
                *table(("cost", "before", "after", "ratio"), costs),
                "",
                f"the outputs differ by {given.absolute:.2g} at most (relative: {given.relative:.2g}), "
                f"with noise on the inputs by {noisy.absolute:.2g} ({noisy.relative:.2g})",
            ]
        )

    def _costs(self) -> list[tuple[str, int, int]]:
        before, after = self.before, self.after
        return [
            ("parameters", before.parameters, after.parameters),
            ("multiply-adds", before.macs, after.macs),
            ("bytes in a file", before.file_bytes, after.file_bytes),
            ("microseconds a call", round(before.latency * 1e6), round(after.latency * 1e6)),
        ]


def report(model: nn.Module, small: nn.Module, inputs: Any) -> Report:
    """Compare a model with the smaller one that `shrink` made of it.

    ``inputs`` is what the models are called with, as for `find_units`: a tensor, a tuple of arguments or a dict of
    keyword arguments. The models are called in evaluation mode, and timed for a few seconds.
    """
    models = (model, small)
    if not all(isinstance(m, nn.Module) for m in models):
        raise TypeError("report takes two torch.nn.Modules, the model before and after shrinking, and then the inputs")
    before, after = find_units(model, inputs), find_units(small, inputs)
    devices = list({p.device for m in models for p in m.parameters() if p.is_cuda})
    with evaluating(model), evaluating(small):
        given, noisy = before.inputs, tree_map(_noisy, before.inputs)
        differences = [_difference(*(_output(m, x) for m in models)) for x in (given, noisy)]
        calls = [_call(m, given) for m in models]
        with seeded(0, *models):
            costs = [_cost(*each) for each in zip(models, calls, _latencies(calls, devices), strict=True)]
    return Report(_sizes(before, after), costs[0], costs[1], differences[0], differences[1])


def _call(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    """A call of the model on these inputs, in its own dtype and on its own device."""
    args, kwargs = fit(inputs, model)
    return lambda: model(*args, **kwargs)


def _noisy(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    spread = x.std(correction=0)
    return x + noise * torch.where(spread > 0, spread, torch.ones_like(spread))


def _output(model: nn.Module, inputs: Any) -> Any:
    with seeded(0, model):  # both models start from the same state, should they be random in evaluation mode
        return _call(model, inputs)()


def _difference(before: Any, after: Any) -> Difference:
    """The largest over all tensors in the outputs."""
    cure = "Was the second model made from the first by pathprox.shrink?"
    leaves, structure = tree_flatten(before)
    others, other = tree_flatten(after)
    if structure != other or [isinstance(x, Tensor) for x in leaves] != [isinstance(x, Tensor) for x in others]:
        raise ValueError(f"the models' outputs differ in structure: {structure} and {other}. {cure}")
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Tensor)]
    if not pairs:
        raise ValueError("the models return no tensors, so their outputs cannot be compared")
    for a, b in pairs:
        if a.shape != b.shape:
            raise ValueError(f"an output of shape {tuple(a.shape)} became one of shape {tuple(b.shape)}. {cure}")
    gaps = [_gap(a, b) for a, b in pairs]
    return Difference(max(g.absolute for g in gaps), max(g.relative for g in gaps))


def _gap(a: Tensor, b: Tensor) -> Difference:
    if not a.numel():
        return Difference(0.0, 0.0)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.cpu().to(wide), b.cpu().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
    absolute, scale = float(gap.max()), float(a.abs().nan_to_num(0.0, 0.0).max())
    return Difference(absolute, absolute / scale if scale else (math.inf if absolute else 0.0))


def _latencies(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[float]:
    """The median of each, measured in turns, so that whatever slows the machine down slows both."""

    def seconds(call: Callable[[], Any]) -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for call in calls:
        seconds(call)  # warms up caches and kernels
    times: list[list[float]] = []
    stop = time.perf_counter() + SECONDS
    while len(times) < 3 or (len(times) < REPEATS and time.perf_counter() < stop):
        turn = 1 if len(times) % 2 else -1
        times.append([seconds(call) for call in calls[::turn]][::turn])
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _cost(model: nn.Module, call: Callable[[], Any], latency: float) -> Cost:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return Cost(sum(p.numel() for p in model.parameters()), count_macs(call), file.getbuffer().nbytes, latency)


def count_macs(call: Callable[[], Any]) -> int:
    """The multiply-adds of the matrix products and convolutions in a call."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # attention in one piece is not counted
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


def _sizes(before: Units, after: Units) -> tuple[GroupSize, ...]:
    """Groups of the same name belong together, in their order of occurrence."""
    found: dict[Any, list[int | None]] = {}
    for column, units in enumerate((before, after)):
        seen: Counter[Any] = Counter()
        for group in units:
            layers = (group.layers_in, group.layers_out)
            found.setdefault((*layers, seen[layers]), [None, None])[column] = len(group)
            seen[layers] += 1
    return tuple(GroupSize(into, out, *sizes) for (into, out, _), sizes in found.items())


def _ratio(before: float, after: float) -> float:
    return before / after if after else (math.inf if before else 1.0)


def _count(units: int | None) -> str:
    return "-" if units is None else str(units)
