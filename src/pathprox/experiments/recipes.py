"""The paper's experiments as data: one frozen recipe for each cell, and the grids.

A recipe decides everything about a run but its seed. ``RECIPES`` holds the cells with the hyperparameters that the
paper chose; ``grid`` gives the cells of its searches. Both modifications of the paper (true labels, corrupted data)
have the same hyperparameters and train on the same data, so one run serves both: it is evaluated on the clean and on
the corrupted test set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pathprox.experiments.data import NAMES
from pathprox.experiments.methods import METHODS
from pathprox.experiments.models import build

SEEDS = (0, 1, 2, 3)
"""Four runs for each cell, as in the paper. The split into training and validation images has its own, fixed seed."""


@dataclass(frozen=True)
class Pruning:
    """Task 5: a unit that is zero once stays so; from each checkpoint a cut network is trained on."""

    checkpoints: tuple[int, ...] = (5000, 10000, 15000, 20000, 25000, 30000)
    threshold: float = 1e-5
    """Units with |w| |v| below it are removed at a checkpoint."""
    steps: int = 10000
    """Training steps of each cut network."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run but its seed."""

    task: str
    method: str
    """One of `METHODS`."""
    model: str
    """A name that `pathprox.experiments.models.build` knows."""
    data: str
    """A name that `pathprox.experiments.data.load` knows."""
    lr: float
    weight_decay: float
    batch: int
    steps: int
    look_every: int
    """Steps between two evaluations."""
    milestones: tuple[int, ...] = ()
    """Steps at which the learning rate is divided by ten."""
    corrupted: str | None = None
    """The corrupted test set that the chosen network is evaluated on."""
    loss_images: int | None = None
    """How many training images the objective is evaluated on; None: all."""
    lipschitz: bool = False
    """Measure local Lipschitz constants on 1000 test images at the start and at the end."""
    snapshots: tuple[int, ...] = ()
    """Steps at which the weights go into the record; for tiny networks only."""
    prune: Pruning | None = None
    momentum: float = 0.0
    """The paper has none."""
    clip: float | None = None
    """Largest norm of the gradient of the loss; a larger one is scaled down. The paper does not."""
    lipschitz_curve: bool = False
    """Measure the median of those constants at every look."""

    def __post_init__(self) -> None:
        self._check(self.method in METHODS, f"method {self.method!r} is none of {', '.join(METHODS)}")
        self._check(self.data in NAMES, f"data {self.data!r} is none of {', '.join(NAMES)}")
        _require_network(self.model)
        for name in ("lr", "batch", "steps", "look_every"):
            self._check(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        self._check(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        self._check(0 <= self.momentum < 1, f"momentum must be in [0, 1), got {self.momentum}")
        self._check(self.clip is None or self.clip > 0, f"clip must be above 0, got {self.clip}")
        for name, marks in (("milestones", self.milestones), ("snapshots", self.snapshots), ("checkpoints", self.cuts)):
            rising = all(a < b for a, b in zip((0, *marks), (*marks, self.steps + 1), strict=True))
            self._check(rising, f"{name} must rise and lie in 1..{self.steps}, got {marks}")

    def _check(self, fine: bool, message: str) -> None:
        if not fine:
            raise ValueError(f"recipe {self.task}/{self.method}: {message}")

    @property
    def name(self) -> str:
        return f"{self.task}/{self.method}"

    @property
    def cuts(self) -> tuple[int, ...]:
        """The checkpoints of Task 5."""
        return self.prune.checkpoints if self.prune else ()

    @property
    def counts_all_groups(self) -> bool:
        """Whether active units are counted in every hidden layer instead of in the couplings.

        So the paper does for MLP-3-800: all its neurons are units, but only every other layer can be in a coupling.
        """
        return self.model == "MLP-3-800"

    def lr_at(self, step: int) -> float:
        """The learning rate of the step after ``step`` steps."""
        return self.lr * 0.1 ** sum(step >= m for m in self.milestones)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Recipe:
        prune = fields.get("prune")
        return cls(**{**_tuples(fields), "prune": prune and Pruning(**_tuples(prune))})

    @property
    def key(self) -> str:
        """Eight letters that stand for all fields: two recipes with the same key are the same.

        Fields at their default do not count, so that a new field leaves old records where they are.
        """
        default = {f.name: f.default for f in dataclasses.fields(self)}
        set_here = {name: value for name, value in self.to_dict().items() if value != default[name]}
        return hashlib.sha256(json.dumps(set_here, sort_keys=True).encode()).hexdigest()[:8]

    def lasting(self, steps: int) -> Recipe:
        """The same recipe at another length: milestones, snapshots and checkpoints move along, and looks become fewer.

        A shorter run has about fifty looks, or as many as the whole one if that is less.
        """

        def scaled(marks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(min(steps, max(1, round(m * steps / self.steps))) for m in marks))

        prune = self.prune
        if prune is not None:
            after = max(1, round(prune.steps * steps / self.steps))
            prune = dataclasses.replace(prune, checkpoints=scaled(prune.checkpoints), steps=after)
        return dataclasses.replace(
            self,
            steps=steps,
            look_every=min(self.look_every, max(round(self.look_every * steps / self.steps), -(-steps // 50))),
            milestones=scaled(self.milestones),
            snapshots=scaled(self.snapshots),
            prune=prune,
        )

    def until(self, steps: int) -> Recipe:
        """The same recipe that only ends sooner or later; milestones and other marks after its end are never met."""

        def met(marks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(m for m in marks if m <= steps)

        prune = self.prune and dataclasses.replace(self.prune, checkpoints=met(self.prune.checkpoints))
        return self.changed(steps=steps, milestones=met(self.milestones), snapshots=met(self.snapshots), prune=prune)

    def changed(self, **fields: Any) -> Recipe:
        """With other hyperparameters; unknown names are an error that lists the known ones."""
        known = [f.name for f in dataclasses.fields(self)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"a recipe has no {', '.join(unknown)}; its fields are {', '.join(known)}")
        return dataclasses.replace(self, **fields)


@cache
def _require_network(name: str) -> None:
    """An error unless there is such a network; asked once for each name, since thousands of recipes are read."""
    build(name, meta=True)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


CIFAR_EPOCH, SVHN_EPOCH = 45000 // 128, 67257 // 128
"""Steps in an epoch; the last, incomplete batch of an epoch is left out."""

_MNIST = {"corrupted": "mnist-c", "batch": 200, "look_every": 500, "lipschitz": True}
_TASK1 = {**_MNIST, "model": "MLP-3-400 factorized", "data": "mnist-100", "steps": 100_000}
_OBJECTIVE = {**_MNIST, "data": "mnist", "corrupted": None, "lipschitz": False}
_DECAYED = {**_TASK1, "milestones": (50_000, 75_000), "lr": 0.3, "weight_decay": 1e-4}


def _vgg(epoch: int) -> dict[str, Any]:
    return {
        "model": "VGG19",
        "batch": 128,
        "steps": 160 * epoch,
        "milestones": (80 * epoch, 120 * epoch),
        "look_every": 2 * epoch,
        "loss_images": 10_000,
    }


TASKS: dict[str, dict[str, Any]] = {
    "task1": _TASK1,
    "task2": {**_MNIST, "model": "MLP-6-400", "data": "mnist", "steps": 50_000},
    "task3": {**_vgg(CIFAR_EPOCH), "data": "cifar10", "corrupted": "cifar10-c"},
    "task4": {**_vgg(SVHN_EPOCH), "data": "svhn"},
    "task5": {**_MNIST, "data": "mnist", "steps": 30_000, "corrupted": None, "prune": Pruning(), "lipschitz": False},
    # Figures 1 and 3 are Task 1 with one lambda for all methods, and with a decaying learning rate as the text says.
    "figure1": {**_DECAYED, "corrupted": None},
    "figure3": {**_DECAYED, "corrupted": None, "lipschitz": False},
    # The same comparison for Tasks 2 and 5: one lambda, one network, and a learning rate that lets F settle.
    "task2-decay": {
        **_OBJECTIVE,
        "model": "MLP-6-400",
        "steps": 50_000,
        "milestones": (25_000, 37_500),
        "lr": 0.1,
        "weight_decay": 3e-4,
    },
    "task5-decay": {
        **_OBJECTIVE,
        "model": "MLP-3-800 factorized",
        "steps": 30_000,
        "milestones": (15_000, 22_500),
        "lr": 0.03,
        "weight_decay": 3e-3,
    },
    "figure2": {
        "model": "shallow-200",
        "data": "plane",
        "batch": 200,
        "steps": 100_000,
        "look_every": 1000,
        "snapshots": (2_000, 100_000),
        "lr": 0.1,
        "weight_decay": 1e-4,
    },
}
"""What the methods of a task share."""

CHOSEN: dict[str, dict[str, dict[str, Any]]] = {
    "task1": {
        "weight-decay": {"weight_decay": 1e-3, "lr": 0.3},
        "pathprox": {"weight_decay": 1e-4, "lr": 0.3},
    },
    "task2": {
        "weight-decay": {"weight_decay": 3e-5, "lr": 0.1},
        "pathprox": {"weight_decay": 3e-4, "lr": 0.1},
    },
    "task3": {
        method: {"weight_decay": 1e-3, "lr": 0.1}
        for method in ("weight-decay", "pathprox", "pathprox-unbalanced", "normalized")
    },
    "task4": {
        "weight-decay": {"weight_decay": 1e-3, "lr": 0.3},
        "pathprox": {"weight_decay": 3e-3, "lr": 0.1},
    },
    # Figure 4 shows the best of the grid; the paper names no choice. The middle of the grid stands for it.
    "task5": {
        "weight-decay": {"weight_decay": 3e-3, "lr": 0.03, "model": "MLP-3-800"},
        "lasso": {"weight_decay": 1e-3, "lr": 0.03, "model": "MLP-3-800"},
        "group-lasso": {"weight_decay": 1e-3, "lr": 0.03, "model": "MLP-3-800"},
        "pathprox": {"weight_decay": 3e-3, "lr": 0.03, "model": "MLP-3-800 factorized"},
    },
    "figure1": {"weight-decay": {}, "pathprox": {}},
    "figure2": {"weight-decay": {}, "pathprox": {}},
    "figure3": {"weight-decay": {}, "pathprox": {}, "path-norm": {}},
    "task2-decay": {"weight-decay": {}, "pathprox": {}},
    "task5-decay": {"weight-decay": {}, "pathprox": {}},
}
"""What each method of a task has of its own: for Tasks 1 to 4 the paper's choice of hyperparameters."""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for task, methods in CHOSEN.items()
    for method, own in methods.items()
    for recipe in [Recipe(task=task, method=method, **{**TASKS[task], **own})]
}


@dataclass(frozen=True)
class Grid:
    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]


_LAMBDAS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
GRIDS: dict[str, Grid] = {
    "task1": Grid((0.003, 0.01, 0.03, 0.1, 0.3, 0.5), _LAMBDAS),
    "task2": Grid((0.003, 0.01, 0.03, 0.1, 0.3, 0.5), _LAMBDAS),
    "task3": Grid((0.01, 0.03, 0.1, 0.3), _LAMBDAS),
    "task4": Grid((0.03, 0.1, 0.3, 0.5), (1e-4, 3e-4, 1e-3, 3e-3)),
    "task5": Grid((0.01, 0.03), (1e-4, 1e-3, 3e-3, 1e-2)),
    "figure3": Grid((0.003, 0.01, 0.03, 0.1, 0.3, 0.5), (1e-4,)),
}
"""The paper's searches."""


def recipe_of(name: str) -> Recipe:
    """The recipe of that name, or an error that lists what there is."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}. There are: {', '.join(RECIPES)}")
    return RECIPES[name]


def grid(recipe: Recipe, cells: Grid | None = None) -> list[Recipe]:
    """The recipe with every learning rate and weight decay of the grid (by default the paper's for its task)."""
    cells = cells or _grid_of(recipe)
    return [recipe.changed(lr=lr, weight_decay=wd) for lr in cells.lr for wd in cells.weight_decay]


def neighbours(recipe: Recipe) -> list[Recipe]:
    """The recipe, and the cells of the paper's grid beside it: the next learning rates and the next weight decays."""
    cells = _grid_of(recipe)
    lrs, decays = _next_to(recipe.lr, cells.lr), _next_to(recipe.weight_decay, cells.weight_decay)
    return [recipe, *(recipe.changed(lr=lr) for lr in lrs), *(recipe.changed(weight_decay=wd) for wd in decays)]


def _grid_of(recipe: Recipe) -> Grid:
    if recipe.task not in GRIDS:
        raise ValueError(f"the paper has no grid for {recipe.task}. Give one: --grid 'lr=0.1,0.3 weight_decay=0.001'")
    return GRIDS[recipe.task]


def _next_to(value: float, values: Sequence[float]) -> list[float]:
    below, above = [v for v in values if v < value], [v for v in values if v > value]
    return [*below[-1:], *above[:1]]
