"""What is seen of a network: loss, both objectives, accuracies, corrupted sets, size, Lipschitz constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.experiments.batches import Fixed
from pathprox.experiments.data import Dataset, Split, corrupted
from pathprox.experiments.loop import Loop, Setting
from pathprox.experiments.recipes import Recipe
from pathprox.report import count_macs

LIPSCHITZ_IMAGES = 1000


class Looks:
    """The sets that a network in training is evaluated on, on its device."""

    def __init__(self, recipe: Recipe, data: Dataset, setting: Setting) -> None:
        self._data, self._setting, self._recipe = data, setting, recipe
        self.train = Fixed(data, data.train, setting.device, recipe.loss_images)
        self.val = Fixed(data, data.val, setting.device)
        self.test = Fixed(data, data.test, setting.device)

    def __call__(self, loop: Loop, step: int) -> dict[str, float]:
        """One entry of the history. The loss is computed in float32 also where the network trains in bfloat16."""
        loss = self._loss(loop.model)
        values = pathprox.objective(loop.units, loss, loop.regularizer.weight_decay)
        return {
            "loss": loss,
            "objective": values.weight_decay,
            "path_norm": values.path_norm,
            "balanced": values.balanced,
            "active": loop.active(),
            "val": self.accuracy(loop.model, self.val),
            "test": self.accuracy(loop.model, self.test),
            **self._as_in_training(loop.model, step),
            **self.middling(loop.model),
        }

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        model.eval()
        parts = [cross_entropy(model(x), y, reduction="sum").double() for x, y in self.train.parts()]
        model.train()
        return float(torch.stack(parts).sum()) / len(self.train)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, images: Fixed, random: torch.Generator | None = None) -> float:
        """In percent; with ``random`` on images that are cropped and flipped as in training."""
        model.eval()
        right = 0
        for x, y in images.parts(random=random):
            with self._setting.autocast():
                right = right + (model(x).argmax(1) == y).sum()
        model.train()
        return 100 * float(right) / len(images)

    def _as_in_training(self, model: nn.Module, step: int) -> dict[str, float]:
        """Accuracy on validation images that are cropped and flipped, by which the authors' public code chooses."""
        if not (self._data.crop or self._data.flip):
            return {}
        return {"val_augmented": self.accuracy(model, self.val, torch.Generator().manual_seed(step))}

    def corrupted(self, best: nn.Module, last: nn.Module, name: str, folder: Path | None) -> dict[str, Any]:
        """What the best network and the last one make of the corrupted test images, which are read once."""

        def both(split: Split) -> list[tuple[float, float]]:
            images = self.fixed(split)
            return [(self.accuracy(best, images), self.accuracy(last, images))]

        return on_corrupted(name, folder, both)[0]

    def fixed(self, split: Split) -> Fixed:
        return Fixed(self._data, split, self._setting.device)

    def lipschitz(self, model: nn.Module) -> list[float]:
        """Sorted local Lipschitz constants on the first test images, with few digits."""
        x, _ = next(self.test.parts(LIPSCHITZ_IMAGES))
        return [float(f"{v:.4g}") for v in sorted(pathprox.local_lipschitz(model, x).tolist())]

    def middling(self, model: nn.Module) -> dict[str, float]:
        """The median of those constants, for recipes that ask for it at every look."""
        return {"lipschitz": median(self.lipschitz(model))} if self._recipe.lipschitz_curve else {}


def on_corrupted(
    name: str, folder: Path | None, of: Callable[[Split], list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """What is seen on a corrupted set, for as many runs as ``of`` gives accuracies of the best and the last network.

    The best one's on each corruption (all severities together), on each severity, and their mean; of the last one its
    mean and that on each severity. Or, once for all runs, why there is nothing to see.
    """
    try:
        sets = corrupted(name, folder)
    except FileNotFoundError:  # its message names a folder of this machine, which is nothing for a record
        absent = f"not in the data folder; `pathprox data make {name}` makes it"
        return [{"name": name, "absent": absent, "last_mean": None}]
    seen = [(label.partition("/"), of(split)) for label, split in sets.parts()]
    found = []
    for i in range(len(seen[0][1])):
        each: dict[str, list[float]] = {}
        severities: dict[str, list[tuple[float, float]]] = {}
        for (corruption, _, severity), accuracies in seen:
            each.setdefault(corruption, []).append(accuracies[i][0])
            if severity:
                severities.setdefault(severity, []).append(accuracies[i])
        found.append(
            {
                "name": name,
                "origin": sets.origin,
                "missing": list(sets.missing),
                "mean": fmean(map(fmean, each.values())),
                "each": {k: fmean(v) for k, v in each.items()},
                "severities": {k: fmean(best for best, _ in v) for k, v in severities.items()},
                "last_severities": {k: fmean(last for _, last in v) for k, v in severities.items()},
                "last_mean": fmean(accuracies[i][1] for _, accuracies in seen),
            }
        )
    return found


def size(loop: Loop) -> dict[str, int]:
    """Parameters and multiply-adds of one image, as trained and once the dead units are removed."""
    small = pathprox.shrink(loop.model, loop.units)
    assert loop.units.inputs is not None
    x = loop.units.inputs[0][0][:1].to(loop.setting.device)
    found = {}
    for prefix, model in (("", loop.model), ("shrunk_", small)):
        found[f"{prefix}parameters"] = sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            found[f"{prefix}macs"] = count_macs(partial(model, x))
    return found
