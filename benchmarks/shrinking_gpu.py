"""Training with units removed on the way against training without, on a GPU: VGG19 on CIFAR-10 as Task 3 has it.

    python benchmarks/shrinking_gpu.py --data-dir DIR [--epochs 160] [--every 10] [--multiple-of 8] [--precision bf16]

Both runs have the same start, batches and schedule, and every step is a CUDA graph; after each removal it is recorded
anew. Everything is on the clock: the search for units that can go, the trial of each removal, recording, and looks at
the test set. Writes benchmarks/shrinking_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.experiments.batches import Batches, Fixed
from pathprox.experiments.data import Dataset, load
from pathprox.experiments.loop import Replay, Setting
from pathprox.experiments.recipes import CIFAR_EPOCH, RECIPES, Recipe
from pathprox.experiments.train import example_of, start_of

TARGET = Path(__file__).with_suffix(".json")
PATIENCE = 100
"""Steps that a unit has to be dead before it goes."""


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Fixed, setting: Setting) -> float:
    with setting.autocast():
        right = sum((model(x).argmax(1) == y).sum() for x, y in images.parts())
    return round(100 * float(right) / len(images), 2)


def train(recipe: Recipe, data: Dataset, setting: Setting, every: int | None, multiple_of: int) -> list[dict[str, Any]]:
    """Ten looks at a run; ``every``: epochs between two removals."""
    begun = time.perf_counter()
    model = start_of(recipe, 0)
    units = pathprox.find_units(model, example_of(data))
    model.to(setting.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, fused=True)
    steps = every and every * CIFAR_EPOCH
    prox = pathprox.PathProx(
        units, recipe.weight_decay, shrink_every=steps, patience=PATIENCE, multiple_of=multiple_of
    ).attach(optimizer)
    batches, test = Batches(data, recipe.batch, 0, setting.device), Fixed(data, data.test, setting.device)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            loss = cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()

    replay, seen, removing = Replay(step), [], 0.0
    for k in range(recipe.steps):
        if optimizer.param_groups[0]["lr"] != recipe.lr_at(k):
            optimizer.param_groups[0]["lr"] = recipe.lr_at(k)
            replay.forget()
        replay(*batches.at(k))
        if steps and (k + 1) % steps == 0:
            torch.cuda.synchronize()
            start = time.perf_counter()
            if prox.remove_settled():
                replay = Replay(step)
            removing += time.perf_counter() - start
        if (k + 1) % (recipe.steps // 10) == 0:
            torch.cuda.synchronize()
            look = {
                "epoch": (k + 1) // CIFAR_EPOCH,
                "seconds": round(time.perf_counter() - begun, 2),
                "of them removing": round(removing, 2),
                "parameters": sum(p.numel() for p in model.parameters()),
                "test": accuracy(model, test, setting),
            }
            seen.append(look)
            print(f"every {every}:", look, flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--multiple-of", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    setting = Setting.of("cuda", options.precision)
    setting.prepare()
    recipe = RECIPES["task3/pathprox"].lasting(options.epochs * CIFAR_EPOCH)
    data = load(recipe.data, options.data_dir)
    runs = {
        name: train(recipe, data, setting, every, options.multiple_of)
        for name, every in (("with", options.every), ("without", None))
    }
    found = {
        "what": f"Task 3, PathProx, {options.epochs} epochs, {options.precision}; units removed every {options.every}, "
        f"and a multiple of {options.multiple_of} left",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "seconds, without / with": round(runs["without"][-1]["seconds"] / runs["with"][-1]["seconds"], 3),
        **runs,
    }
    TARGET.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["seconds, without / with"]))


if __name__ == "__main__":
    main()
