"""What a run leaves behind: one small JSON file. Tables and figures read these and nothing else."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import pathprox
from pathprox.experiments.recipes import Recipe

RUNNING, DONE, DIVERGED, INTERRUPTED, STUCK = "running", "done", "diverged", "interrupted", "stuck"
LEARNT = 0.8
PATIENCE = {"looks": 10, "steps": 1000}
"""A run is stuck if its loss was never below that share of what it was at the start, in so many looks and steps."""
DIGITS = 6
"""Significant digits of the numbers in a record."""


def _versions() -> dict[str, str]:
    return {"pathprox": pathprox.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass
class Record:
    """A run: what it was, what was seen while it trained, and what came out.

    ``history`` has one list for each quantity, an entry for each look: step, lr, loss, objective (the weight-decay
    objective F of the weights as they are), path_norm (G), balanced (F at its least over all rescalings), active,
    val, test, seconds; val_augmented (accuracy on validation images that are cropped and flipped) where training images
    are, and lipschitz (the median of local Lipschitz constants) where a recipe asks for it. Accuracies and shares of
    units are in percent. ``final`` has

    - best: step, val, test and active at the look with the best validation accuracy, the paper's choice;
    - last: means over the last tenth of the looks, and the spread of active units;
    - corrupted: origin, mean and each corruption's accuracy of the best network, its mean at each severity where there
      are several, and the means of the last network (last_mean, last_severities);
    - size: parameters and multiply-adds of the best network as trained and once shrunk;
    - lipschitz: start and end, sorted local Lipschitz constants on 1000 test images;
    - pruned (Task 5): for each checkpoint the share of units left, accuracies and parameters;
    - weights (Figure 2): for each snapshot the weights of the network.
    """

    recipe: Recipe
    seed: int
    status: str = RUNNING
    """running, done, diverged (a number was not finite), stuck (nothing was learned) or interrupted."""
    message: str = ""
    """Why it did not end as it should."""
    device: str = ""
    precision: str = "float32"
    compiled: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    """Where the data came from, and how many images there were."""
    versions: dict[str, str] = field(default_factory=_versions)
    history: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether running it again would bring nothing new."""
        return self.outcome in (DONE, DIVERGED, STUCK)

    @property
    def stuck(self) -> bool:
        """Whether it has learned nothing. A mean over seeds with such a run in it says nothing about the others.

        Task 5 has strong penalties on purpose, and shows what comes of them.
        """
        losses = [loss for loss in self.history.get("loss", ()) if loss is not None]
        if self.recipe.prune is not None or len(losses) <= PATIENCE["looks"]:
            return False
        return self.history["step"][-1] >= PATIENCE["steps"] and min(losses) > LEARNT * losses[0]

    @property
    def outcome(self) -> str:
        """The status, but "stuck" also for a run that went on, or was stopped by hand, with nothing learned."""
        return STUCK if self.stuck else self.status

    @property
    def name(self) -> str:
        return run_name(self.recipe, self.seed)

    @property
    def measured(self) -> tuple[int, int]:
        """How much was: of two runs of the same the one with more counts."""
        return len(self.final), len(self.history)

    def add(self, **seen: float) -> None:
        """One more entry of the history."""
        for key, value in seen.items():
            self.history.setdefault(key, []).append(value)

    def write(self, folder: Path) -> Path:
        """Into its place under ``folder``, whole or not at all."""
        path = folder / f"{self.name}.json"
        fields = {**asdict(self), "recipe": self.recipe.to_dict()}
        with replacing(path) as file:
            file.write_text(json.dumps(_tidy(fields), separators=(",", ":"), allow_nan=False) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            fields = json.loads(path.read_text())
            return cls(**{**fields, "recipe": Recipe.from_dict(fields["recipe"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a record of a run: {error}. Delete it and run that cell again.") from error


def best_look(record: Record, since: int = 0, by: str = "val") -> dict[str, float]:
    """The first look with the best validation accuracy from a step on, which is how the paper chooses."""
    late = [i for i, step in enumerate(record.history["step"]) if step >= since]
    at = max(late, key=lambda i: record.history[by][i])
    return {key: record.history[key][at] for key in ("step", "val", "test", "active", "balanced")}


def run_name(recipe: Recipe, seed: int) -> str:
    """Where a run's files are, below the folder of all records: readable, and different for different recipes."""
    return f"{recipe.task}/{recipe.method}/lr{recipe.lr:g}-wd{recipe.weight_decay:g}-seed{seed}-{recipe.key}"


def read_all(folder: Path) -> list[Record]:
    """Every record under ``folder``, in the order of their names."""
    return [Record.read(path) for path in sorted(folder.glob("*/*/lr*-seed*.json"))]


def find(folder: Path, recipe: Recipe, seed: int) -> Record | None:
    """The record of that run, if there is one."""
    path = folder / f"{run_name(recipe, seed)}.json"
    return Record.read(path) if path.exists() else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place at the end: a killed process leaves the old one as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _tidy(x: Any) -> Any:
    """For JSON: few digits, and None for a number that is not finite."""
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(k): _tidy(v) for k, v in x.items()}
    return [_tidy(v) for v in x] if isinstance(x, list | tuple) else x
