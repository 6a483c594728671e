"""Whole grids at once: the cells of a sweep that differ in learning rate, weight decay and seed alone, trained as one
`Stack`. The records are those that runs one by one would leave, up to rounding: the starts and the batches are the same
to the last bit."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathprox.experiments.batched_cuts import Cuts
from pathprox.experiments.batched_training import Feed, Training
from pathprox.experiments.batches import Batches
from pathprox.experiments.data import Split, load
from pathprox.experiments.looks import Looks, on_corrupted, size
from pathprox.experiments.loop import Loop, Setting
from pathprox.experiments.models import MLP
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.record import DIVERGED, DONE, Record, best_look, replacing
from pathprox.experiments.stack import (
    Plan,
    Stack,
    accuracies,
    active,
    mean_losses,
    path_norms,
    smallest_squares,
    squares,
)
from pathprox.experiments.stack_step import KNOWN
from pathprox.experiments.sweep import Cell, Work
from pathprox.experiments.train import example_of, last_looks, start_of

MOST = 64
"""So many networks at once are enough to keep a GPU busy, and have room there."""
SAVE_EVERY = 60.0
"""Seconds between two checkpoints: a whole grid is large."""


@dataclass(frozen=True)
class Batched:
    """A pool that trains up to so many cells, or cut networks of Task 5, as one program."""

    most: int = MOST

    def __call__(self, work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        kinds: dict[Recipe, list[Cell]] = {}
        for recipe, seed in cells:
            kinds.setdefault(dataclasses.replace(recipe, lr=1.0, weight_decay=0.0), []).append((recipe, seed))
        for kind, same in kinds.items():
            check(kind)
            for i in range(0, len(same), self.most):
                yield from Batch(work, same[i : i + self.most], self.most).run()


def check(recipe: Recipe) -> None:
    cure = "Leave it out, and give --jobs instead."
    if not recipe.model.startswith("MLP"):
        raise ValueError(f"--batched trains MLPs together, not {recipe.model}. {cure}")
    if recipe.momentum:
        raise ValueError(f"--batched is for SGD without momentum, not with {recipe.momentum:g}. {cure}")
    if recipe.clip is not None:
        raise ValueError(f"--batched does not clip gradients. {cure}")
    if recipe.method not in KNOWN:
        raise ValueError(f"--batched does not know the method {recipe.method}. {cure}")


class Batch:
    """Cells that differ in learning rate, weight decay and seed."""

    def __init__(self, work: Work, cells: Sequence[Cell], most: int = MOST) -> None:
        self.work, self.cells, self.recipe, self.most = work, cells, cells[0][0], most
        self.setting = Setting.of(work.device, work.precision)
        if self.setting.precision == "bf16":
            raise ValueError("--batched computes in float32 or tf32. Say --precision tf32, or leave --batched out.")
        self.setting.prepare()
        device = self.setting.device
        self.data = load(self.recipe.data, work.data_dir, download=True)
        self.example = example_of(self.data)
        seeds = sorted({seed for _, seed in cells})
        self.batches = {seed: Batches(self.data, self.recipe.batch, seed, device) for seed in seeds}
        self.loops = {seed: self._start(seed) for seed in seeds}
        models = [self._model(self.loops[seed]) for _, seed in cells]
        self.stack = Stack(models, Plan.of(self.loops[seeds[0]].units), device)
        self.training = Training(
            self.stack,
            self.recipe,
            torch.tensor([recipe.lr for recipe, _ in cells], device=device),
            torch.tensor([recipe.weight_decay for recipe, _ in cells], device=device),
            Feed(self.batches, [(seed, 0) for _, seed in cells], device),
        )
        self.eyes = Looks(self.recipe, self.data, self.setting)
        self.records = [self._record(*cell) for cell in cells]
        self.best = [] if self.recipe.prune else [p.clone() for p in self.stack.parameters]
        """The weights at each cell's best validation accuracy, which Task 5 does not ask for."""
        self.marked: dict[int, list[Tensor]] = {}
        """Weights at Task 5's checkpoints, by their step."""
        self.step = 0
        self.cuts = Cuts(self) if self.recipe.prune else None
        digest = hashlib.sha256(" ".join(r.name for r in self.records).encode()).hexdigest()[:12]
        self.checkpoint = work.folder / f"batch-{digest}.pt"
        self._clock = self._saved = time.monotonic()

    def _start(self, seed: int) -> Loop:
        """The network with its regulariser attached: for PathProx |w| is in v, and the layers are balanced."""
        return Loop(self.recipe, start_of(self.recipe, seed), self.example, self.setting)

    def _model(self, loop: Loop) -> MLP:
        assert isinstance(loop.model, MLP)
        return loop.model

    def _record(self, recipe: Recipe, seed: int) -> Record:
        record = Record(recipe, seed, device=self.setting.device_name, precision=self.setting.precision)
        sizes = {part: len(getattr(self.data, part)) for part in ("train", "val", "test")}
        record.data = {"origin": self.data.origin, **sizes, "trained_together": len(self.cells)}
        return record

    # Training.

    def run(self) -> Iterator[Record]:
        recipe = self.recipe
        if self.checkpoint.exists():
            self._load()
        else:
            self._look()
        marks = {recipe.steps, *recipe.snapshots, *recipe.cuts}
        while self.step < recipe.steps:
            self.training(self.step)
            self.step += 1
            if self.step in recipe.milestones:
                self.training.lr.mul_(0.1)
            if self.step % recipe.look_every == 0 or self.step in marks:
                self._look()
        self._finish()
        for record in self.records:
            record.write(self.work.folder)
            yield record
        self.checkpoint.unlink(missing_ok=True)

    # Looking.

    def _look(self) -> None:
        decay, stack = self.training.weight_decay.double(), self.stack
        loss = mean_losses(stack, self.eyes.train)
        seen = {
            "loss": loss,
            "objective": loss + decay / 2 * squares(stack),
            "path_norm": loss + decay * path_norms(stack),
            "balanced": loss + decay / 2 * smallest_squares(stack),
            "active": active(stack, self.training.counted),
            "val": accuracies(stack, self.eyes.val),
            "test": accuracies(stack, self.eyes.test),
        }
        rows = {key: values.tolist() for key, values in seen.items()}
        better = [self._note(i, {key: values[i] for key, values in rows.items()}) for i in range(len(self.records))]
        if self.best:
            mask = torch.tensor(better, device=loss.device)
            for best, now in zip(self.best, stack.parameters, strict=True):
                best[mask] = now[mask]
        if self.step in self.recipe.cuts:
            self.marked[self.step] = [p.to("cpu", copy=True) for p in stack.parameters]
        self.save()

    def _note(self, i: int, seen: dict[str, float]) -> bool:
        """Add to the history of a cell that is still well; returns whether it is the best it has been."""
        record = self.records[i]
        if record.status == DIVERGED:
            return False
        if not math.isfinite(seen["loss"]):
            self.diverged(i, f"the loss is {seen['loss']} after step {self.step}")
            return False
        best = not record.history or seen["val"] > max(record.history["val"])
        if self.recipe.lipschitz_curve:
            seen |= self.eyes.middling(self.restored(i, self.stack).model)
        record.seconds = self._elapsed() / len(self.records)
        record.add(step=self.step, lr=record.recipe.lr_at(self.step), **seen, seconds=record.seconds)
        if self.recipe.lipschitz and self.step in (0, self.recipe.steps):
            loop = self.restored(i, self.stack)
            when = "end" if self.step else "start"
            record.final.setdefault("lipschitz", {})[when] = self.eyes.lipschitz(loop.model)
        if self.step in self.recipe.snapshots:
            weights = {name: t.tolist() for name, t in self.stack.state(i).items()}
            record.final.setdefault("weights", {})[str(self.step)] = weights
        return best

    def diverged(self, i: int, what: str) -> None:
        self.records[i].status, self.records[i].message = DIVERGED, f"{what}. Lower the learning rate."

    # The end.

    def _finish(self) -> None:
        for i in self.well:
            self.records[i].final |= {"best": best_look(self.records[i]), "last": last_looks(self.records[i])}
        if self.cuts is not None:
            self.cuts.run()
        else:
            self._evaluate_best()
        for i in self.well:
            self.records[i].status = DONE
            self.records[i].seconds = self._elapsed() / len(self.records)

    @property
    def well(self) -> list[int]:
        """The cells that have not diverged."""
        return [i for i, record in enumerate(self.records) if record.status != DIVERGED]

    def _evaluate_best(self) -> None:
        best = self.stack.holding(self.best)
        spoiled = self._corrupted(best)
        for i in self.well:
            if spoiled:
                self.records[i].final["corrupted"] = spoiled[i]
            self.records[i].final["size"] = size(self.restored(i, best))

    def _corrupted(self, best: Stack) -> list[dict[str, Any]]:
        """For each cell what a single run would record."""

        def both(split: Split) -> list[tuple[float, float]]:
            images = self.eyes.fixed(split)
            return list(zip(*(accuracies(s, images).tolist() for s in (best, self.stack)), strict=True))

        found = on_corrupted(self.recipe.corrupted, self.work.data_dir, both) if self.recipe.corrupted else []
        return found * len(self.records) if len(found) == 1 else found

    def restored(self, i: int, stack: Stack) -> Loop:
        """A single network again, with its units."""
        loop = self.loops[self.cells[i][1]]
        loop.model.load_state_dict(stack.state(i))
        return loop

    # Keeping what was done.

    def _elapsed(self) -> float:
        """Seconds, over all processes that worked on this batch."""
        return time.monotonic() - self._clock

    def save(self) -> None:
        """Unless that was done a moment ago."""
        if time.monotonic() - self._saved <= SAVE_EVERY:
            return
        self._saved = time.monotonic()
        state = {
            "step": self.step,
            "elapsed": self._elapsed(),
            "records": [{**vars(r), "recipe": None} for r in self.records],
            "best": self.best,
            "training": self.training.state(),
            "marked": self.marked,
            "cuts": self.cuts.state() if self.cuts else None,
        }
        with replacing(self.checkpoint) as file:
            torch.save(state, file)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.setting.device, weights_only=True)
        self.step, self.best, self.marked = state["step"], state["best"], state["marked"]
        self._clock = time.monotonic() - state["elapsed"]
        self.training.load(state["training"])
        recipes = [recipe for recipe, _ in self.cells]
        self.records = [Record(**{**r, "recipe": c}) for r, c in zip(state["records"], recipes, strict=True)]
        if self.cuts is not None:
            self.cuts.load(state["cuts"])
