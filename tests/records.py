"""Records that no run made: smooth made-up histories of every task, to test what is made from records."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pathprox.experiments.data.plane import points
from pathprox.experiments.models import build
from pathprox.experiments.paper import CLEAN, TABLES
from pathprox.experiments.recipes import CHOSEN, RECIPES, SEEDS, Recipe
from pathprox.experiments.record import DONE, Record

CELLS = {(c.task, c.method): c for cells in TABLES.values() for c in cells if c.modification == CLEAN}
FASTER = {"pathprox": 6.0, "pathprox-unbalanced": 5.0, "path-norm": 1.2}
FEWEST = {"pathprox": 40.0, "pathprox-unbalanced": 35.0, "group-lasso": 70.0, "lasso": 80.0}
LOOKS = 40


def record(task: str, method: str, seed: int = 0, **changes: Any) -> Record:
    """A run that is done. ``changes`` are fields of the recipe (``steps`` takes all marks along) or of the record."""
    recipe = RECIPES[f"{task}/{method}"]
    if "steps" in changes:
        recipe = recipe.lasting(changes.pop("steps"))
    known = {f.name for f in dataclasses.fields(Recipe)}
    recipe = recipe.changed(**{k: v for k, v in changes.items() if k in known})
    made = Record(recipe, seed, status=DONE, device="cpu", data={"origin": "made up"}, seconds=60.0 + seed)
    made.history, made.final = history(recipe, seed), {}
    made.final = final(made)
    return dataclasses.replace(made, **{k: v for k, v in changes.items() if k not in known})


def all_records() -> list[Record]:
    """Every recipe of the paper with all its seeds."""
    return [record(task, method, seed) for task, methods in CHOSEN.items() for method in methods for seed in SEEDS]


def history(recipe: Recipe, seed: int) -> dict[str, list[float]]:
    """Curves that fall or rise as those of real runs do."""
    noise = random.Random(f"{recipe.name} {recipe.lr} {recipe.weight_decay} {seed}")
    cell = CELLS.get((recipe.task, recipe.method))
    level = (cell.accuracy.mean if cell else 95.0) + noise.gauss(0, 0.15)
    speed, fewest = FASTER.get(recipe.method, 1.0), FEWEST.get(recipe.method, 100.0)
    found: dict[str, list[float]] = {}
    for look in range(LOOKS + 1):
        t = look / LOOKS
        loss = 2.3 * math.exp(-25 * t) + 2e-3 * (1 + noise.random())
        balanced = loss + 0.05 + 0.25 * math.exp(-3 * speed * t) * (1 + 0.02 * noise.gauss(0, 1))
        seen = {
            "step": round(t * recipe.steps),
            "lr": recipe.lr_at(round(t * recipe.steps)),
            "loss": loss,
            "objective": balanced * (1 + 0.3 * math.exp(-4 * t)),
            "path_norm": balanced,
            "balanced": balanced,
            "active": fewest + (100 - fewest) * math.exp(-5 * t),
            "val": level - 60 * math.exp(-12 * t) + 0.1 * noise.random(),
            "test": level - 60 * math.exp(-12 * t) + 0.1 * noise.random(),
            "seconds": 60 * t,
        }
        for key, value in seen.items():
            found.setdefault(key, []).append(value)
    return found


def final(made: Record) -> dict[str, Any]:
    """What a run of such a recipe measures in the end."""
    seen, recipe = made.history, made.recipe
    noise = random.Random(f"final {made.name}")
    at = seen["val"].index(max(seen["val"]))
    found: dict[str, Any] = {
        "best": {key: seen[key][at] for key in ("step", "val", "test", "active", "balanced")},
        "last": {
            "looks": 4,
            "active": sum(seen["active"][-4:]) / 4,
            "active_spread": 0.2,
            "balanced": sum(seen["balanced"][-4:]) / 4,
        },
    }
    if recipe.prune:
        found["pruned"] = [cut(recipe, checkpoint, noise) for checkpoint in recipe.cuts]
    else:
        left = round(1e6 * (found["best"]["active"] / 100) ** 2)
        found["size"] = {"parameters": 10**6, "macs": 10**6, "shrunk_parameters": left, "shrunk_macs": left}
    if recipe.corrupted:
        mean = found["best"]["test"] - 26 + noise.gauss(0, 0.4)
        found["corrupted"] = {"name": recipe.corrupted, "origin": "official", "missing": [], "mean": mean, "each": {}}
        if recipe.corrupted == "cifar10-c":
            found["corrupted"] |= {key: {"5": mean} for key in ("severities", "last_severities")}
    if recipe.lipschitz:
        ends = {"start": (0.6, 0.1), "end": (3.0 if recipe.method == "pathprox" else 6.0, 1.2)}
        found["lipschitz"] = {
            when: sorted(abs(noise.gauss(centre, width)) for _ in range(200)) for when, (centre, width) in ends.items()
        }
    if recipe.snapshots:
        place, classes = points(42)
        found["points"] = {"x": place.flatten(1).tolist(), "y": classes.tolist()}
        found["weights"] = {str(s): weights(recipe, s) for s in recipe.snapshots}
    return found


def cut(recipe: Recipe, checkpoint: int, noise: random.Random) -> dict[str, float]:
    """A cut network of Task 5: the later and the more weight decay, the fewer units."""
    strength = (checkpoint / recipe.steps) * (2 + math.log10(recipe.weight_decay / 1e-4)) / 4
    fewest = {"weight-decay": 64.0, "lasso": 8.0, "group-lasso": 3.0, "pathprox": 1.0}[recipe.method]
    active = 100 * (fewest / 100) ** (strength * noise.uniform(0.8, 1))
    test = 98.4 - 9 / (1 + active) - noise.uniform(0, 1.5) - (0 if recipe.method == "pathprox" else 0.3)
    return {
        "checkpoint": checkpoint,
        "active": active,
        "val": test + noise.gauss(0, 0.1),
        "test": test,
        "parameters": round(20000 * active),
    }


@functools.cache
def _fitted(model: str, rounds: int) -> dict[str, Any]:
    """A network that has seen the points for a while."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build(model)
    place, classes = points(42)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(rounds):
        optimizer.zero_grad()
        cross_entropy(network(place.flatten(1)), classes).backward()
        optimizer.step()
    return {name: tensor.tolist() for name, tensor in network.state_dict().items()}


def weights(recipe: Recipe, step: int) -> dict[str, Any]:
    quick = recipe.method == "pathprox"
    return _fitted(recipe.model, 150 if step == recipe.steps else 60 if quick else 10)


def rows(table: str) -> list[list[str]]:
    """The cells of a table below its head."""
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
