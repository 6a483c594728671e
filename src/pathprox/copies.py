"""Private copies of a model, to try things on."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: positional and keyword arguments."""


def inner_name(model: nn.Module) -> str | None:
    """Under which attribute a wrapper (DDP, a compiled model) holds the model; None if it is no wrapper."""
    parallel = dict.fromkeys(("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"), "module")
    return {**parallel, "OptimizedModule": "_orig_mod"}.get(type(model).__name__)


def double(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A private copy in float64 and evaluation mode, and inputs for it; in float32 where the model insists on it."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            "the model has lazy layers that have no weights yet. Call it once on an example, then find_units."
        )

    def cast(dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        copied = copy_of(model).to(dtype).eval()
        device = next((p.device for p in copied.parameters()), torch.device("cpu"))

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.detach().to(device, dtype if x.is_floating_point() else x.dtype)

        return copied, tree_map(move, inputs)

    copied, given = cast(torch.float64)
    try:
        with torch.no_grad():
            copied(*given[0], **given[1])
        return copied, given
    except Exception:
        copied, given = cast(torch.float32)
    try:
        with torch.no_grad():
            copied(*given[0], **given[1])
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on these example inputs: {error}\n"
            "Give find_units what the model is called with: a tensor, a tuple of arguments or a dict of keywords."
        ) from error
    return copied, given


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps an activation of its last call."""
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in kept if not t.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied, which the proof needs: {error}") from error


def fit(inputs: Inputs, model: nn.Module) -> Inputs:
    """The inputs on the model's device and, where they are not whole numbers, in its type."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(like) if x.is_floating_point() else x.to(like.device)

    return tree_map(move, inputs)


@torch.no_grad()
def shaken(model: nn.Module, inputs: Inputs, fresh: bool = False, seed: int = 0) -> Inputs:
    """Add noise to a model's parameters, half as large as they are, in place; returns inputs with noise added.

    ``fresh``: replace the parameters, by random ones of an ordinary size.
    """
    random = torch.Generator().manual_seed(seed)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=random, dtype=torch.float64).to(x)

    for parameter in model.parameters():
        if fresh and parameter.is_floating_point():
            fan = max(1, parameter[0].numel()) if parameter.dim() > 1 else 4
            parameter.copy_(noise(parameter) / fan**0.5)
        elif parameter.is_floating_point():
            size = parameter.square().mean().sqrt() if parameter.numel() else torch.tensor(0.0)
            parameter.add_(noise(parameter) * (size / 2 if size > 0 else 0.5))
    return tree_map(lambda x: x + noise(x) if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; every module's own mode comes back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def exact() -> Iterator[None]:
    """Products in full float32: tf32, if someone has allowed it, rounds by more than what tells two functions apart."""
    switches: Any = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


@contextmanager
def seeded(seed: int, *models: nn.Module) -> Iterator[None]:
    """The same random numbers every time, from torch, Python and numpy; their states are left as they were.

    Of GPUs only those that the models are on are touched: `torch.manual_seed` would reset all of them.
    """
    parameters = (p for model in models for p in model.parameters())
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    numpy: Any = sys.modules.get("numpy")  # torch does without it, and so does a model that has not imported it
    python, array = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)):
                generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)
