"""How many iterations PathProx needs for the objective that weight decay ends at: Task 1, lambda 1e-4, lr 0.3.

    python benchmarks/convergence.py [--steps 10000]

Both train on the MNIST subset of the package, from the same start and with the same batches. What is compared is the
weight-decay objective at each one's smallest representation. Writes benchmarks/convergence.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from pathprox.experiments.loop import Setting
from pathprox.experiments.recipes import RECIPES
from pathprox.experiments.record import Record
from pathprox.experiments.train import run

TARGET = Path(__file__).with_suffix(".json")


def first_below(record: Record, level: float) -> int | None:
    """The first look at which the balanced objective is at or below the level, as the number of its step."""
    looks = zip(record.history["step"], record.history["balanced"], strict=True)
    return next((int(step) for step, value in looks if value <= level), None)


def main(steps: int) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in ("weight-decay", "pathprox"):
            recipe = RECIPES[f"figure1/{method}"].lasting(steps).changed(data="mnist-embedded", look_every=steps // 100)
            record = run(recipe, 0, Path(folder), setting=Setting.of("cpu"))
            found[method] = record
            print(method, "ends at", record.history["balanced"][-1], f"({record.seconds:.0f} s)", flush=True)
    level = found["weight-decay"].history["balanced"][-1]
    reached = first_below(found["pathprox"], level)
    result = {
        "what": "figure1 recipes on mnist-embedded, seed 0, CPU",
        "steps": steps,
        "balanced objective at the end": {m: r.history["balanced"][-1] for m, r in found.items()},
        "test accuracy at the end": {m: r.history["test"][-1] for m, r in found.items()},
        "iterations of PathProx to weight decay's final objective": reached,
        "share of weight decay's iterations": None if reached is None else reached / steps,
        "torch": torch.__version__,
    }
    TARGET.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    main(parser.parse_args().steps)
