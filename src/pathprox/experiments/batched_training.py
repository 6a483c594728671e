"""A stack in training: its learning rates and weight decays, its batches, its mask, and the step as one program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathprox.experiments.batches import Batches
from pathprox.experiments.loop import Replay
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.stack import Stack
from pathprox.experiments.stack_step import Mask, step_


class Feed:
    """The batches of several networks, each with its seed and the step that its batches begin with.

    Networks that agree in both see the same images, which are read once.
    """

    def __init__(self, batches: Mapping[int, Batches], keys: Sequence[tuple[int, int]], device: torch.device) -> None:
        distinct = sorted(set(keys))
        # Copies share the images; but each prepares the epoch that it has reached.
        self._sources = [(copy.copy(batches[seed]), begin) for seed, begin in distinct]
        self._which = torch.tensor([distinct.index(key) for key in keys], device=device)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Images and labels, (sources, batch, ...)."""
        x, y = zip(*(source.at(begin + step) for source, begin in self._sources), strict=True)
        return torch.stack(x), torch.stack(y)

    def spread(self, x: Tensor) -> Tensor:
        """From one entry for each source to one for each network; or a single one for all."""
        return x if len(self._sources) == 1 else x[self._which]


class Training:
    """A stack, and all that a step of it needs."""

    def __init__(self, stack: Stack, recipe: Recipe, lr: Tensor, weight_decay: Tensor, feed: Feed) -> None:
        self.stack, self.lr, self.weight_decay = stack, lr, weight_decay
        self.counted = stack.hidden if recipe.counts_all_groups else stack.plan.pairs
        """The hidden layers whose active units are counted."""
        self.mask = Mask(stack, self.counted) if recipe.prune else None
        self._method, self._feed = recipe.method, feed
        self._replay = Replay(self._step) if lr.device.type == "cuda" else self._step

    def __call__(self, step: int) -> None:
        """The step after so many."""
        self._replay(*self._feed.at(step))

    def _step(self, x: Tensor, y: Tensor) -> None:
        spread = self._feed.spread
        step_(self.stack, spread(x), spread(y), self._method, self.lr, self.weight_decay, self.mask)

    def state(self) -> dict[str, Any]:
        """All that changes from step to step."""
        return {"lr": self.lr, "now": self.stack.parameters, "alive": self.mask.alive if self.mask else []}

    def load(self, state: dict[str, Any]) -> None:
        self.lr.copy_(state["lr"])
        pairs = [(self.stack.parameters, state["now"]), (self.mask.alive if self.mask else [], state["alive"])]
        for mine, saved in pairs:
            for tensor, value in zip(mine, saved, strict=True):
                tensor.copy_(value)
