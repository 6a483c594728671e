"""Running a recipe: training, looks, checkpoints, Task 5's cut networks, and the record of it all."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathprox
from pathprox.balance import scale_
from pathprox.experiments.batches import Batches
from pathprox.experiments.data import Dataset, load, normalized
from pathprox.experiments.looks import Looks, size
from pathprox.experiments.loop import Loop, Setting
from pathprox.experiments.models import build
from pathprox.experiments.recipes import Recipe
from pathprox.experiments.record import DIVERGED, DONE, INTERRUPTED, RUNNING, STUCK, Record, best_look, find, replacing

Watch = Callable[[Record, int, int], None]
"""Called after each look with the record so far, the steps done and the steps in all."""
SAVING = 30
"""Between two checkpoints lies at least so many times the time that one takes."""
LAST = 10
"""The last tenth of the looks is averaged beside the best one."""


class StuckError(RuntimeError):
    """Nothing is learned, and going on would change nothing."""


class UnfinishedError(RuntimeError):
    """There is an interrupted run of this recipe, which starting over would overwrite."""


def run(
    recipe: Recipe,
    seed: int,
    folder: Path,
    *,
    setting: Setting | None = None,
    data_dir: Path | None = None,
    resume: bool = False,
    again: bool = False,
    watch: Watch | None = None,
) -> Record:
    """Train by the recipe and write the record under ``folder``; a run that is finished there is not repeated.

    ``resume`` continues an interrupted one from its checkpoint, ``again`` starts over in any case. A number that is not
    finite ends the run with the status "diverged", a loss that does not fall with "stuck"; the record up to there is
    kept.
    """
    before = find(folder, recipe, seed)
    if before is not None and before.finished and not again:
        return before
    work = Run(recipe, seed, folder, setting, data_dir, watch)
    if work.checkpoint.exists() and not again:
        if not resume:
            raise UnfinishedError(
                f"{recipe.name} with seed {seed} was interrupted and can go on from its last checkpoint. "
                "Say --resume to continue it, or --again to start over."
            )
        work.load()
    for _ in work.looks():
        pass
    return work.record


def start_of(recipe: Recipe, seed: int) -> nn.Module:
    """The network as it is before the first step: the same for all methods that share a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(recipe.model)


class Run:
    """One recipe with one seed. Its state is the loop's, the record, and what was set aside on the way."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        folder: Path,
        setting: Setting | None = None,
        data_dir: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        setting = setting or Setting.of()
        setting.prepare()
        self.recipe, self.setting, self.folder, self.data_dir, self.watch = recipe, setting, folder, data_dir, watch
        self.record = Record(
            recipe, seed, device=setting.device_name, precision=setting.precision, compiled=setting.compiled
        )
        self.checkpoint = folder / f"{self.record.name}.pt"
        data = load(recipe.data, data_dir, download=True)
        self.record.data = {"origin": data.origin, **{p: len(getattr(data, p)) for p in ("train", "val", "test")}}
        self.batches = Batches(data, recipe.batch, seed, setting.device)
        self.eyes = Looks(recipe, data, setting)
        self.example = example_of(data)
        self.loop = Loop(recipe, start_of(recipe, seed), self.example, setting)
        self.step = 0
        self.best: dict[str, Tensor] = {}
        """The weights at the best validation accuracy so far."""
        self.marked: dict[str, dict[str, Tensor]] = {}
        """Weights at Task 5's checkpoints, by their step."""
        self.branch = 0
        """The checkpoint whose cut network is being trained; 0: none yet."""
        self._clock = time.monotonic()
        self._saved, self._save_cost = -math.inf, 0.0

    # From the first step to the record.

    def looks(self) -> Iterator[None]:
        """Train from look to look; at the end the record is complete. Others may take their turn in between."""
        try:
            if not self.branch:
                yield from self._train()
            yield from self._finish()
        except FloatingPointError as error:
            self._end(DIVERGED, str(error))
        except StuckError as error:
            self._end(STUCK, str(error))
        except KeyboardInterrupt:
            self._end(INTERRUPTED, f"interrupted after step {self.step}; --resume goes on from the last checkpoint")
            raise
        else:
            self._end(DONE)

    def _train(self) -> Iterator[None]:
        recipe = self.recipe
        marks = {recipe.steps, *recipe.snapshots, *recipe.cuts}
        if self.step == 0 and not self.record.history:
            self._look()
            yield
        while self.step < recipe.steps:
            self.loop.step(*self.batches.at(self.step), recipe.lr_at(self.step))
            self.step += 1
            if self.step % recipe.look_every == 0 or self.step in marks:
                self._look()
                yield

    def _look(self) -> None:
        self.loop.regularizer.check()
        seen = self.eyes(self.loop, self.step)
        if not math.isfinite(seen["loss"]):
            raise FloatingPointError(
                f"the loss is {seen['loss']} after step {self.step}, with lr {self.recipe.lr_at(self.step):g}. "
                "Lower the learning rate."
            )
        record, recipe = self.record, self.recipe
        if not record.history or seen["val"] > max(record.history["val"]):
            self.best = _copy(self.loop.model)
        record.add(step=self.step, lr=recipe.lr_at(self.step), **seen, seconds=self._seconds())
        if recipe.lipschitz and self.step in (0, recipe.steps):
            when = "end" if self.step else "start"
            record.final.setdefault("lipschitz", {})[when] = self.eyes.lipschitz(self.loop.model)
        if self.step in recipe.snapshots:
            weights = {name: t.tolist() for name, t in _copy(self.loop.model).items()}
            record.final.setdefault("weights", {})[str(self.step)] = weights
        if self.step in recipe.cuts:
            self.marked[str(self.step)] = _copy(self.loop.model)
        self._save()
        if record.stuck:
            now = record.history["loss"]
            raise StuckError(
                f"the loss is {now[-1]:.4g} after step {self.step}, and was {now[0]:.4g} at the start: nothing is "
                "learned. Try another seed or a lower learning rate."
            )

    def _finish(self) -> Iterator[None]:
        record, recipe = self.record, self.recipe
        record.final["best"], record.final["last"] = best_look(record), last_looks(record)
        if recipe.snapshots:
            train = self.batches.points()
            record.final["points"] = {"x": train[0].tolist(), "y": train[1].tolist()}
        if recipe.prune:
            yield from self._prune()
            return
        last = copy.deepcopy(self.loop.model)
        self.loop.model.load_state_dict(self.best)
        if recipe.corrupted:
            record.final["corrupted"] = self.eyes.corrupted(self.loop.model, last, recipe.corrupted, self.data_dir)
        record.final["size"] = size(self.loop)
        self.loop.model.load_state_dict(last.state_dict())

    # Task 5.

    def _prune(self) -> Iterator[None]:
        """From each checkpoint: cut, shrink, train on."""
        done = self.record.final.setdefault("pruned", [])
        assert self.recipe.prune is not None
        for cut in self.recipe.cuts[len(done) :]:
            loop, left, alive = self._cut(cut)
            if self.branch == cut:
                loop.load(self.waiting)
            else:
                self.branch, self.step = cut, 0
            self.loop = loop
            if alive:
                yield from self._train_on(self.recipe.prune.steps)
            self._note_cut(left)

    def _cut(self, cut: int) -> tuple[Loop, float, bool]:
        whole = Loop(self.recipe, build(self.recipe.model), self.example, self.setting)
        whole.model.load_state_dict(self.marked[str(cut)])
        return without_weak_units(whole, self.example)

    def _train_on(self, steps: int) -> Iterator[None]:
        recipe, lr = self.recipe, self.recipe.lr_at(self.recipe.steps)
        while self.step < steps:
            self.loop.step(*self.batches.at(self.branch + self.step), lr)
            self.step += 1
            if self.step % recipe.look_every == 0:
                self.loop.regularizer.check()
                self._save()
                yield

    def _note_cut(self, left: float) -> None:
        seen = self.eyes(self.loop, self.step)
        parameters = sum(p.numel() for p in self.loop.model.parameters())
        self.record.final["pruned"].append(cut_note(self.branch, left, seen, parameters))
        self._save()

    # Keeping what was done.

    def _seconds(self) -> float:
        """Time since the last call, added up over all processes that worked on this run."""
        now = time.monotonic()
        self.record.seconds += now - self._clock
        self._clock = now
        return self.record.seconds

    def _save(self) -> None:
        """First the checkpoint, unless the last one is too recent, then the record, which is what a reader sees."""
        self._seconds()
        begun = time.monotonic()
        if begun - self._saved > SAVING * self._save_cost:
            with replacing(self.checkpoint) as file:
                torch.save(self._state(), file)
            self._saved = time.monotonic()
            self._save_cost = self._saved - begun
        self._show()

    def _state(self) -> dict[str, Any]:
        return {
            "record": {**vars(self.record), "recipe": None},
            "loop": self.loop.state(),
            "step": self.step,
            "best": self.best,
            "marked": self.marked,
            "branch": self.branch,
        }

    def _show(self) -> None:
        self.record.write(self.folder)
        if self.watch is not None:
            branches = len(self.recipe.cuts) * (self.recipe.prune.steps if self.recipe.prune else 0)
            before = 0
            if self.branch:
                assert self.recipe.prune is not None
                before = self.recipe.steps + self.recipe.cuts.index(self.branch) * self.recipe.prune.steps
            self.watch(self.record, before + self.step, self.recipe.steps + branches)

    def load(self) -> None:
        """Go back to the last checkpoint of an interrupted run."""
        state = torch.load(self.checkpoint, map_location=self.setting.device, weights_only=True)
        self.record = Record(**{**state["record"], "recipe": self.recipe, "status": RUNNING, "message": ""})
        self.step, self.best, self.marked, self.branch = (state[k] for k in ("step", "best", "marked", "branch"))
        self.waiting = state["loop"]
        if not self.branch:
            self.loop.load(self.waiting)

    def _end(self, status: str, message: str = "") -> None:
        self.record.status, self.record.message = status, message
        self._seconds()
        self.record.write(self.folder)
        if self.record.finished:
            self.checkpoint.unlink(missing_ok=True)


def without_weak_units(whole: Loop, example: Tensor) -> tuple[Loop, float, bool]:
    """The network of a checkpoint without its weak units, the share of units it still has, in percent, and whether it
    is alive: one that has lost all units of a layer says the same of every image, and stays as large as it was."""
    prune = whole.recipe.prune
    assert prune is not None
    masks = [whole.units.path_norm(group) >= prune.threshold for group in whole.groups]
    left = 100 * float(torch.cat(masks).double().mean())
    with torch.no_grad():
        for group, alive in zip(whole.groups, masks, strict=True):
            for s in group.out:
                scale_(whole.units, s, alive)
    if not all(bool(alive.any()) for alive in masks):
        return whole, left, False
    small = pathprox.shrink(whole.model, whole.units).cpu()
    return Loop(whole.recipe, small, example, whole.setting), left, True


def cut_note(checkpoint: int, left: float, seen: dict[str, float], parameters: int) -> dict[str, float]:
    """What a record says of a network that was cut and trained on."""
    accuracies = {key: seen[key] for key in ("val", "test", "loss")}
    return {"checkpoint": checkpoint, "active": left, **accuracies, "parameters": parameters}


def last_looks(record: Record) -> dict[str, float]:
    """Means over the last tenth of the looks, since active units come and go from step to step."""
    count = max(1, len(record.history["step"]) // LAST)
    last = {key: record.history[key][-count:] for key in ("val", "test", "active", "balanced")}
    means = {key: statistics.fmean(values) for key, values in last.items()}
    return {"looks": count, **means, "active_spread": statistics.pstdev(last["active"])}


def example_of(data: Dataset) -> Tensor:
    """Two images, as a network sees them."""
    return normalized(data.train.images[:2], data.mean, data.std)


def _copy(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
