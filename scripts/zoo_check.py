"""What is done with one model of the zoo: find its units, kill a third of them, shrink it, compare. Gives a record."""

from __future__ import annotations

import operator
import platform
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo_models import Entry, Inputs, build

import pathprox
from pathprox import UnitGroup, Units

SEED = 0
SHARE = 1 / 3
"""Of the units of every group, rounded down: those that are killed."""
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference of the outputs, relative to the largest one, that counts as none, by the precision inside."""
LIBRARIES = ("torch", "torchvision", "timm", "transformers")
Record = dict[str, Any]


def check(name: str, all_units: bool = False, note: Callable[[Record], None] = lambda record: None) -> Record:
    """The record of one model. What goes wrong on the way is its status, and ends it there.

    ``note`` is given what is known when the units are found: shrinking may outlast the time limit.
    """
    record: Record = blank(name, all_units)
    random = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    with _stage(record, "does not build"):
        entry = build(name)
        randomize_(entry.model.eval(), random)
        settle_norms_(entry, random)
        entry = _double(entry, random)
        record["precision"] = str(_precision(entry, random)).removeprefix("torch.")
        record["parameters"] = _count(entry.model)
    if "status" not in record:
        with _stage(record, "find_units failed"), _timed(record, "find_units"):
            units = pathprox.find_units(entry.model, entry.draw(random), homogeneous_only=not all_units)
    if "status" not in record:
        _describe(record, units)
        note(record)
    if "status" not in record:
        record["dead"] = kill_(units, random)
        with _stage(record, "shrink failed"), _timed(record, "shrink"):
            small = _shrink(record, entry.model, units)
    if "status" not in record:
        with _stage(record, "the small model fails"):
            record["parameters_after"] = _count(small)
            record["status"] = _verdict(record, entry, small, random)
    record["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return record


def blank(name: str, all_units: bool) -> Record:
    """The part of a record that is known before anything is tried."""
    source, _, model = name.partition("/")
    return {
        "source": source,
        "model": model,
        "asked": "all units" if all_units else "homogeneous units",
        "versions": {"python": platform.python_version(), "pathprox": pathprox.__version__}
        | {library: _version(library) for library in LIBRARIES},
        "seed": SEED,
        "seconds": {},
    }


def _version(library: str) -> str | None:
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return None


@contextmanager
def _stage(record: Record, failure: str) -> Iterator[None]:
    """Whatever is raised inside becomes the status."""
    try:
        yield
    except Exception as error:
        if "torch.export cannot trace" in str(error):
            record["status"] = f"not traced: {shorten(str(error))}"
        else:
            record["status"] = f"{failure}: {type(error).__name__}: {shorten(str(error))}"


@contextmanager
def _timed(record: Record, what: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        record["seconds"][what] = round(time.perf_counter() - start, 2)


@torch.no_grad()
def randomize_(model: nn.Module, random: torch.Generator) -> None:
    """Leave nothing at the constant it starts with: a scale of zero or a running mean of zero would hide a mistake."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
            noise = torch.randn(parameter.shape, generator=random).clamp(-2, 2)
            parameter.copy_(0.1 * noise if parameter.flatten()[0] == 0 else 1 + 0.3 * noise)


@torch.no_grad()
def settle_norms_(entry: Entry, random: torch.Generator) -> None:
    """Batch-norm statistics near those of random inputs: with any others a signal dies out on its way through."""
    norms = [m for m in entry.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.momentum]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    entry.model(*map(torch.cat, zip(*(entry.draw(random) for _ in range(4)), strict=True)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
        noise, factor = (
            torch.randn(norm.num_features, generator=random),
            torch.rand(norm.num_features, generator=random),
        )
        norm.running_mean += 0.1 * noise * norm.running_var.sqrt()
        norm.running_var *= 0.5 + factor


def _double(entry: Entry, random: torch.Generator) -> Entry:
    """The same in float64; in float32 where the model insists on it."""
    for dtype in (torch.float64, torch.float32):
        made = Entry(entry.model.to(dtype), _casting(entry.draw, dtype))
        try:
            _outputs(made.model, made.draw(random))
            break
        except RuntimeError:
            if dtype is torch.float32:
                raise
    return made


def _casting(draw: Callable[[torch.Generator], Inputs], dtype: torch.dtype) -> Callable[[torch.Generator], Inputs]:
    return lambda random: tuple(x.to(dtype) if x.is_floating_point() else x for x in draw(random))


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


class _Watch(TorchDispatchMode):
    """Collects the floating-point types that a model computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()}
        return out


def _precision(entry: Entry, random: torch.Generator) -> torch.dtype:
    """The coarsest type inside: many transformers compute norms in float32, whatever their weights are in."""
    inputs = entry.draw(random)  # outside: drawing them is no part of the model
    with _Watch() as watch:
        _outputs(entry.model, inputs)
    return min(watch.seen, key=lambda dtype: torch.finfo(dtype).bits)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _describe(record: Record, units: Units) -> None:
    """What was found and what was left out; without any unit, the most frequent reason is the status."""
    reasons = Counter(_general(x.reason) for x in units.left_out)
    unproved = [x for x in units.left_out if x.reason.startswith(("failed the proof", "could not be tried"))]
    record |= {
        "groups": len(units),
        "homogeneous_groups": sum(g.homogeneous for g in units),
        "bundles": sum(map(len, units.bundles)),
        "units": sum(map(len, units)),
        "couplings": len(units.couplings),
        "left_out": len(units.left_out),
        "left_out_reasons": dict(reasons.most_common(6)),
        "unproved": len(unproved),
        "unproved_examples": {x.layer: shorten(x.reason) for x in unproved[:4]},
        "notes": [shorten(note) for note in units.notes],
    }
    if not units:
        record["status"] = f"no units: {next(iter(reasons), 'no layer was left out either')}"


@torch.no_grad()
def kill_(units: Units, random: torch.Generator) -> int:
    """Make a share of every group's units dead: half of them unheard, half silent. Returns how many.

    Where units come in bundles, as the dimensions of attention heads do, whole bundles die.
    """
    bundled = {s.name for b in units.bundles for s in b.out}
    for group in (*units.bundles, *(g for g in units if not any(s.name in bundled for s in g.out))):
        few = max(1, int(len(group) * SHARE)) if len(group) > 1 else 0  # never all of them
        dead = torch.randperm(len(group), generator=random)[:few]
        heard, loud = torch.ones(2, len(group))
        half = len(dead) // 2 if group.homogeneous else len(dead)  # a silent GELU unit may say GELU(bias)
        heard[dead[:half]] = 0
        loud[dead[half:]] = 0
        for slices, factor in ((group.out, heard), (group.into + group.bias, loud)):
            for s in slices:
                s.scale_(units.tensor(s.name).detach(), factor)
    return sum(int((units.norm(g.out) * units.norm(g.into + g.bias) == 0).sum()) for g in units)


def _shrink(record: Record, model: nn.Module, units: Units) -> nn.Module:
    """Shrink, and write down which groups were refused and how many units are gone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small = pathprox.shrink(model, units)
    told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    kept = dict(m.groups() for t in told if (m := re.match(r"dead units of (.*?) were kept: (.*)", t, re.DOTALL)))
    record["refused"] = sum(t.startswith("dead units of") for t in told)
    record["refused_reasons"] = dict(Counter(_general(reason) for reason in kept.values()).most_common(6))
    record["refused_examples"] = {shorten(name): shorten(reason) for name, reason in list(kept.items())[:4]}
    record["removed"] = sum(len(group) - units_left(group, small) for group in units)
    return small


def units_left(group: UnitGroup, small: nn.Module) -> int:
    """How many units the group has in the small model, read off the first parameter that counts its units alone."""
    for s in group.slices:
        grouped = s.dims == (0, 1) and len(s.shape) > 2  # a grouped convolution's outputs
        owned = torch.bincount(s.owner + 1, minlength=len(group) + 1)
        if (len(s.dims) == 1 or grouped) and owned[0] == 0 and bool((owned[1:] == owned[1]).all()):
            tensor = operator.attrgetter(s.name)(small)
            return int(tensor.shape[0 if grouped else s.dims[0]] // owned[1])
    return len(group)


def _verdict(record: Record, entry: Entry, small: nn.Module, random: torch.Generator) -> str:
    """Compare the two models on three inputs that neither has seen."""
    difference, spread, last = 0.0, 0.0, None
    for _ in range(3):
        inputs = entry.draw(random)
        before, after = _outputs(entry.model, inputs), _outputs(small, inputs)
        if [a.shape for a in before] != [b.shape for b in after]:
            return "WRONG: an output has another shape"
        difference = max(difference, relative(before, after))
        spread = max(spread, relative(before, last)) if last is not None else spread
        last = before
    record["difference"], record["spread"] = difference, spread
    if not all(bool(t.isfinite().all()) for t in before):
        return "no verdict: the outputs are not finite"
    if spread < 1e-6:
        return "no verdict: the outputs do not depend on the inputs"
    if not difference <= TOLERANCE.get(record["precision"], 0.0):
        return "WRONG"
    return "exact" if record["removed"] else "nothing removed"


def relative(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry, over all outputs."""
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)) for a, b in zip(before, after, strict=True))


def shorten(text: str, length: int = 200) -> str:
    """One line, without the folders of this machine."""
    text = re.sub(r"(?:/[^\s/:'\"]+)+/(?=[^\s/]+\.py)", "", " ".join(text.split()))
    return text if len(text) <= length else text[: length - 3] + "..."


def _general(reason: str) -> str:
    """A reason without the names of layers and without numbers, so that equal ones can be counted."""
    reason = re.sub(r"\b(?![\w.]*\.py\b)[a-zA-Z_]\w*(?:\.\w+)+", "...", shorten(reason))
    return re.sub(r"(?<![:\w.])-?\d+(?:\.\d+e[+-]?\d+)?\b", "n", reason)
