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

from pathprox.experiments.batches import Batches, Fixed
from pathprox.experiments.data import Split, load
from pathprox.experiments.looks import Looks, on_corrupted, size
from pathprox.experiments.loop import Loop, Replay, Setting
from pathprox.experiments.models import MLP
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.record import DIVERGED, DONE, Record, replacing
from pathprox.experiments.stack import Plan, Stack, path_norms, smallest_squares, squares, step_
from pathprox.experiments.sweep import Cell, Work
from pathprox.experiments.train import best_look, example_of, last_looks, start_of

SAVE_EVERY = 60.0
"""Seconds between two checkpoints: a whole grid is large."""


@dataclass(frozen=True)
class Batched:
    """A pool that trains up to so many cells as one program."""

    most: int = 64

    def __call__(self, work: Work, cells: Sequence[Cell]) -> Iterator[Record]:
        kinds: dict[Recipe, list[Cell]] = {}
        for recipe, seed in cells:
            kinds.setdefault(dataclasses.replace(recipe, lr=1.0, weight_decay=0.0), []).append((recipe, seed))
        for kind, same in kinds.items():
            check(kind)
            for i in range(0, len(same), self.most):
                yield from Batch(work, same[i : i + self.most]).run()


def check(recipe: Recipe) -> None:
    if not recipe.model.startswith("MLP"):
        raise ValueError(f"--batched trains MLPs together, not {recipe.model}. Leave it out, and give --jobs instead.")
    if recipe.prune:
        raise ValueError(
            "--batched does not cut networks, which Task 5 asks for. Leave it out, and give --jobs instead."
        )


class Batch:
    """Cells that differ in learning rate, weight decay and seed."""

    def __init__(self, work: Work, cells: Sequence[Cell]) -> None:
        self.work, self.cells, self.recipe = work, cells, cells[0][0]
        self.setting = Setting.of(work.device, work.precision)
        self.setting.prepare()
        device = self.setting.device
        self.data = load(self.recipe.data, work.data_dir, download=True)
        seeds = sorted({seed for _, seed in cells})
        self.batches = [Batches(self.data, self.recipe.batch, seed, device) for seed in seeds]
        self.which = torch.tensor([seeds.index(seed) for _, seed in cells], device=device)
        self.loops = {seed: self._start(seed) for seed in seeds}
        template = self.loops[seeds[0]]
        models = [self._model(self.loops[seed]) for _, seed in cells]
        self.stack = Stack(models, Plan.of(template.units), device)
        self.lr = torch.tensor([recipe.lr for recipe, _ in cells], device=device)
        self.weight_decay = torch.tensor([recipe.weight_decay for recipe, _ in cells], device=device)
        self.eyes = Looks(self.recipe, self.data, self.setting)
        self.records = [self._record(*cell) for cell in cells]
        self.best = [p.detach().clone() for p in self.stack.parameters]
        self.step = 0
        digest = hashlib.sha256(" ".join(r.name for r in self.records).encode()).hexdigest()[:12]
        self.checkpoint = work.folder / f"batch-{digest}.pt"
        self._replay = Replay(self._step) if device.type == "cuda" else self._step
        self._clock = self._saved = time.monotonic()

    def _start(self, seed: int) -> Loop:
        """The network with its regulariser attached: for PathProx |w| is in v, and the layers are balanced."""
        return Loop(self.recipe, start_of(self.recipe, seed), example_of(self.data), self.setting)

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
        marks = {recipe.steps, *recipe.snapshots}
        while self.step < recipe.steps:
            self._replay(*self._batch())
            self.step += 1
            if self.step in recipe.milestones:
                self.lr.mul_(0.1)
            if self.step % recipe.look_every == 0 or self.step in marks:
                self._look()
        yield from self._finish()
        self.checkpoint.unlink(missing_ok=True)

    def _step(self, x: Tensor, y: Tensor) -> None:
        step_(self.stack, x, y, self.recipe.method, self.lr, self.weight_decay)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Images and labels (1 or n, batch, ...): cells with the same seed see the same ones."""
        pairs = [b.at(self.step) for b in self.batches]
        if len(pairs) == 1:
            return pairs[0][0].unsqueeze(0), pairs[0][1].unsqueeze(0)
        x, y = (torch.stack(parts)[self.which] for parts in zip(*pairs, strict=True))
        return x, y

    # Looking.

    def _look(self) -> None:
        decay = self.weight_decay.double()
        loss = self._mean_loss()
        seen = {
            "loss": loss,
            "objective": loss + decay / 2 * squares(self.stack),
            "path_norm": loss + decay * path_norms(self.stack),
            "balanced": loss + decay / 2 * smallest_squares(self.stack),
            "active": self._active(),
            "val": self._accuracy(self.eyes.val),
            "test": self._accuracy(self.eyes.test),
        }
        rows = {key: values.tolist() for key, values in seen.items()}
        better = [self._note(i, {key: values[i] for key, values in rows.items()}) for i in range(len(self.records))]
        mask = torch.tensor(better, device=self.lr.device)
        for best, now in zip(self.best, self.stack.parameters, strict=True):
            best[mask] = now.detach()[mask]
        if time.monotonic() - self._saved > SAVE_EVERY:
            self._save()

    def _note(self, i: int, seen: dict[str, float]) -> bool:
        """Add to the history of a cell that is still well; returns whether it is the best it has been."""
        record = self.records[i]
        if record.status == DIVERGED:
            return False
        if not math.isfinite(seen["loss"]):
            record.status = DIVERGED
            record.message = f"the loss is {seen['loss']} after step {self.step}. Lower the learning rate."
            return False
        best = not record.history or seen["val"] > max(record.history["val"])
        record.seconds = (time.monotonic() - self._clock) / len(self.records)
        record.add(step=self.step, lr=record.recipe.lr_at(self.step), **seen, seconds=record.seconds)
        if self.recipe.lipschitz and self.step in (0, self.recipe.steps):
            loop = self._restored(i, self.stack)
            when = "end" if self.step else "start"
            record.final.setdefault("lipschitz", {})[when] = self.eyes.lipschitz(loop.model)
        if self.step in self.recipe.snapshots:
            weights = {name: t.tolist() for name, t in self.stack.state(i).items()}
            record.final.setdefault("weights", {})[str(self.step)] = weights
        return best

    def _mean_loss(self) -> Tensor:
        with torch.no_grad():
            parts = [self.stack.losses(x[None], y[None]).double() * len(y) for x, y in self.eyes.train.parts()]
        return torch.stack(parts).sum(0) / len(self.eyes.train)

    def _accuracy(self, images: Fixed, stack: Stack | None = None) -> Tensor:
        right = torch.stack([(stack or self.stack).right(x[None], y[None]) for x, y in images.parts()])
        return 100 * right.sum(0).double() / len(images)

    def _active(self) -> Tensor:
        if self.recipe.counts_all_groups:
            hidden = zip(self.stack.weights[:-1], self.stack.weights[1:], strict=True)
            alive = [a.detach().ne(0).any(2) & b.detach().ne(0).any(1) for a, b in hidden]
        else:
            alive = [(w > 0) & (v > 0) for w, v in self.stack.norms()]
        return 100 * torch.cat(alive, 1).double().mean(1)

    # The end.

    def _finish(self) -> Iterator[Record]:
        best = self.stack.holding(self.best)
        spoiled = self._corrupted(best)
        for i, record in enumerate(self.records):
            if record.status != DIVERGED:
                record.status = DONE
                record.final |= {"best": best_look(record), "last": last_looks(record)}
                if spoiled:
                    record.final["corrupted"] = spoiled[i]
                record.final["size"] = size(self._restored(i, best))
            record.write(self.work.folder)
            yield record

    def _corrupted(self, best: Stack) -> list[dict[str, Any]]:
        """For each cell what a single run would record."""

        def both(split: Split) -> list[tuple[float, float]]:
            images = self.eyes.fixed(split)
            return list(zip(*(self._accuracy(images, s).tolist() for s in (best, self.stack)), strict=True))

        found = on_corrupted(self.recipe.corrupted, self.work.data_dir, both) if self.recipe.corrupted else []
        return found * len(self.records) if len(found) == 1 else found

    def _restored(self, i: int, stack: Stack) -> Loop:
        """A single network again, with its units."""
        loop = self.loops[self.cells[i][1]]
        loop.model.load_state_dict(stack.state(i))
        return loop

    # Keeping what was done.

    def _save(self) -> None:
        self._saved = time.monotonic()
        records = [{**vars(r), "recipe": None} for r in self.records]
        state = {"step": self.step, "lr": self.lr, "records": records, "best": self.best}
        with replacing(self.checkpoint) as file:
            torch.save({**state, "now": [p.detach() for p in self.stack.parameters]}, file)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.lr.device, weights_only=True)
        self.step, self.best = state["step"], state["best"]
        self.lr.copy_(state["lr"])
        for parameter, saved in zip(self.stack.parameters, state["now"], strict=True):
            parameter.data.copy_(saved)
        recipes = [recipe for recipe, _ in self.cells]
        self.records = [Record(**{**r, "recipe": c}) for r, c in zip(state["records"], recipes, strict=True)]
