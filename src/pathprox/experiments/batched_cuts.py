"""Task 5 for a whole grid: the networks cut at each checkpoint of each cell, trained on together.

Each is cut and shrunk as in a single run, and so starts as it does there; in the stack it is filled up with zeros to
the size of the widest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pathprox.experiments.batched_training import Feed, Training
from pathprox.experiments.models import MLP
from pathprox.experiments.stack import Stack, accuracies, mean_losses
from pathprox.experiments.train import cut_note, without_weak_units

if TYPE_CHECKING:
    from pathprox.experiments.batched import Batch

Key = tuple[int, int]
"""A cell's number and a checkpoint."""


@dataclass(frozen=True)
class Cut:
    """A network without its weak units."""

    left: float
    """The share of units it still has, in percent."""
    parameters: int
    model: MLP | None
    """None where a whole layer was lost: it is not trained on."""
    seen: dict[str, float]
    """What such a network is worth; else nothing yet."""


class Cuts:
    """The second part of Task 5 for all cells of a batch. What comes out goes into their records."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._todo: list[Key] | None = None
        """Networks whose training is not finished; None before the first of them was cut."""
        self._step = 0
        self._training: Training | None = None
        self._waiting: dict[str, Any] | None = None
        """The state of an interrupted training."""

    def run(self) -> None:
        """As many networks at a time as the batch allows."""
        batch = self._batch
        if self._todo is None:
            self._todo = [(i, checkpoint) for i in batch.well for checkpoint in batch.recipe.cuts]
            for i in batch.well:
                batch.records[i].final["pruned"] = []
        while self._todo:
            now = self._todo[: batch.most]
            cuts = {key: self._cut(*key) for key in now}
            self._train({key: cut.model for key, cut in cuts.items() if cut.model is not None})
            self._note(cuts)
            well = batch.well
            self._todo = [key for key in self._todo[len(now) :] if key[0] in well]
            self._step, self._training = 0, None
            batch.save()

    def _cut(self, i: int, checkpoint: int) -> Cut:
        """The same network as in a single run."""
        batch = self._batch
        whole = batch.restored(i, batch.stack.holding(batch.marked[checkpoint]))
        loop, left, alive = without_weak_units(whole, batch.example)
        parameters = sum(p.numel() for p in loop.model.parameters())
        if not alive:
            return Cut(left, parameters, None, batch.eyes(loop, checkpoint))
        assert isinstance(loop.model, MLP)
        return Cut(left, parameters, loop.model, {})

    def _train(self, models: dict[Key, MLP]) -> None:
        prune = self._batch.recipe.prune
        assert prune is not None
        if not models:
            return
        training = self._training = self._start(models)
        while self._step < prune.steps:
            training(self._step)
            self._step += 1
            if self._step % self._batch.recipe.look_every == 0:
                self._batch.save()

    def _start(self, models: dict[Key, MLP]) -> Training:
        """From the beginning, or from where an interrupted process was."""
        batch, device = self._batch, self._batch.setting.device
        recipes = [batch.cells[i][0] for i, _ in models]
        training = Training(
            Stack(list(models.values()), batch.stack.plan, device),
            batch.recipe,
            torch.tensor([recipe.lr_at(recipe.steps) for recipe in recipes], device=device),
            torch.tensor([recipe.weight_decay for recipe in recipes], device=device),
            Feed(batch.batches, [(batch.cells[i][1], checkpoint) for i, checkpoint in models], device),
        )
        if self._waiting is not None:
            training.load(self._waiting)
            self._waiting = None
        return training

    def _note(self, cuts: dict[Key, Cut]) -> None:
        """One entry for each network, in the order of the checkpoints; a cell ends with the first that diverged."""
        seen = self._see([key for key, cut in cuts.items() if cut.model is not None])
        for (i, checkpoint), cut in cuts.items():
            values = seen.get((i, checkpoint), cut.seen)
            if i not in self._batch.well:
                continue
            if not math.isfinite(values["loss"]):
                what = f"the loss of the network cut at step {checkpoint} is {values['loss']} after {self._step} more"
                self._batch.diverged(i, what)
                continue
            note = cut_note(checkpoint, cut.left, values, cut.parameters)
            self._batch.records[i].final["pruned"].append(note)

    def _see(self, keys: list[Key]) -> dict[Key, dict[str, float]]:
        if self._training is None:
            return {}
        stack, eyes = self._training.stack, self._batch.eyes
        measured = {
            "loss": mean_losses(stack, eyes.train),
            "val": accuracies(stack, eyes.val),
            "test": accuracies(stack, eyes.test),
        }
        rows = {name: values.tolist() for name, values in measured.items()}
        return {key: {name: values[j] for name, values in rows.items()} for j, key in enumerate(keys)}

    # Keeping what was done.

    def state(self) -> dict[str, Any]:
        training = None if self._training is None else self._training.state()
        return {"todo": self._todo, "step": self._step, "training": training}

    def load(self, state: dict[str, Any]) -> None:
        self._todo = state["todo"] if state["todo"] is None else [(i, c) for i, c in state["todo"]]
        self._step, self._waiting = state["step"], state["training"]
