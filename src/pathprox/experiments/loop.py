"""A network in training: one step of any method, eagerly or as a CUDA graph, and everything that a step changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import pathprox
from pathprox.balance import scale_
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import Recipe
from pathprox.held import REGAUGE

PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Setting:
    """Where and how to compute."""

    device: torch.device
    precision: str = "float32"
    """float32, tf32 (products on the GPU with ten bits), or bf16 (autocast; weights and their step stay in float32)."""
    compiled: bool = False
    """Train through `torch.compile`: faster steps, after a minute of compiling. Looks are at the network as it is."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here. Leave --device out, or say --device cpu.")

    @classmethod
    def of(cls, device: str | None = None, precision: str | None = None, compiled: bool = False) -> Setting:
        """By default the GPU where there is one, and tf32 there."""
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(place, precision or ("tf32" if place.type == "cuda" else "float32"), compiled)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def autocast(self) -> AbstractContextManager[None]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def prepare(self) -> None:
        """Process-wide switches that the precision stands for."""
        fast = self.precision != "float32"
        torch.backends.cuda.matmul.allow_tf32 = fast
        torch.backends.cudnn.allow_tf32 = fast


class Mask:
    """Keeps units dead: one whose w or v is zero after a step has v = 0 from then on (Task 5)."""

    def __init__(self, units: pathprox.Units, groups: tuple[pathprox.UnitGroup, ...]) -> None:
        self.units, self.groups = units, groups
        device = next(units.model.parameters()).device
        self.alive = [torch.ones(len(g), dtype=torch.bool, device=device) for g in groups]

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        """After a step of the optimizer, and of the regulariser."""
        for group, alive in zip(self.groups, self.alive, strict=True):
            alive &= (self.units.norm(group.into) > 0) & (self.units.norm(group.out) > 0)
            for s in group.out:
                scale_(self.units, s, alive)


class Loop:
    """A network, its optimizer and its regulariser."""

    def __init__(self, recipe: Recipe, model: nn.Module, example: Tensor, setting: Setting) -> None:
        self.recipe, self.setting = recipe, setting
        units = pathprox.find_units(model, example)  # on the CPU, whose float64 is not slow
        channels_last = setting.device.type == "cuda" and example.dim() == 4 and example.shape[1] > 1
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model.to(setting.device).to(memory_format=self._layout)  # type: ignore[call-overload]
        self._forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if setting.compiled else self.model
        self.units = units
        self.groups = tuple(units.groups) if recipe.counts_all_groups else units.couplings
        """The groups whose active units are counted."""
        fused = setting.device.type == "cuda"
        self.optimizer = SGD(self.model.parameters(), lr=recipe.lr, momentum=recipe.momentum, fused=fused)
        self.regularizer = METHODS[recipe.method].make(units, recipe.weight_decay).attach(self.optimizer)
        self.mask = Mask(units, self.groups) if recipe.prune else None
        if self.mask is not None:
            self.optimizer.register_step_post_hook(self.mask)
        self._replay: Replay | None = Replay(self._step) if setting.device.type == "cuda" else None
        self._replayed = 0

    def step(self, x: Tensor, y: Tensor, lr: float) -> None:
        """One step on one batch."""
        if self.optimizer.param_groups[0]["lr"] != lr:
            self.optimizer.param_groups[0]["lr"] = lr
            if self._replay is not None:
                self._replay.forget()
        if self._replay is not None:
            self._replay(x, y)
            self._replayed += 1
            if isinstance(self.regularizer, pathprox.PathProx) and self._replayed % REGAUGE == 0:
                self.regularizer.regauge()
        else:
            self._step(x, y)

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.setting.autocast():
            loss = cross_entropy(self._forward(x.contiguous(memory_format=self._layout)), y)
        loss.backward()
        if self.recipe.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()

    def active(self, threshold: float = 0.0) -> float:
        """The share of units whose path norm is above the threshold, in percent."""
        alive = torch.cat([self.units.path_norm(g) > threshold for g in self.groups])
        return 100 * float(alive.double().mean())

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on from here."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "regularizer": self.regularizer.state_dict(),
            "mask": self.mask.alive if self.mask else [],
            "replayed": self._replayed,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.regularizer.load_state_dict(state["regularizer"])
        self._replayed = state.get("replayed", 0)
        for mine, saved in zip(self.mask.alive if self.mask else [], state["mask"], strict=True):
            mine.copy_(saved)


class Replay:
    """A training step recorded as a CUDA graph: one launch in place of hundreds.

    The first calls run as they are written, on another stream as recording wants it; they are steps like all others.
    """

    WARM = 3

    def __init__(self, step: Callable[[Tensor, Tensor], None]) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Record anew at the next call: a number that the graph has taken for a constant has changed."""
        self._graph = None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self._calls += 1
        if self._calls <= self.WARM:
            self._aside(x, y)
            return
        if self._graph is None:
            self._record(x, y)
        assert self._inputs is not None
        assert self._graph is not None
        self._inputs[0].copy_(x)
        self._inputs[1].copy_(y)
        self._graph.replay()

    def _aside(self, x: Tensor, y: Tensor) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(x, y)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Recording runs nothing: the weights stay as they are."""
        self._inputs = (x.clone(), y.clone())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(*self._inputs)
