"""The 42 cells of Task 1's grid on a GPU: as one batched program, and one by one with CUDA graphs.

    python benchmarks/grid_gpu.py --data-dir DIR [--steps 2000] [--single 4]

Times whole runs (training, looks, record) of both, the single ones for a few cells, and gives the ratio for all 42.
Writes benchmarks/grid_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from pathprox.experiments.batched import Batched
from pathprox.experiments.recipes import RECIPES, grid
from pathprox.experiments.sweep import Work, complete, in_turn

TARGET = Path(__file__).with_suffix(".json")


def main(data_dir: Path, steps: int, single: int) -> None:
    result: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": steps}
    for method in ("pathprox", "weight-decay"):
        recipe = RECIPES[f"task1/{method}"].lasting(steps).changed(lipschitz=False)
        cells = [(cell, 0) for cell in grid(recipe)]
        with tempfile.TemporaryDirectory() as folder:
            work = {name: Work(Path(folder) / name, data_dir, "cuda", "tf32") for name in ("warm", "many", "single")}
            complete([(recipe.lasting(50), 0)], work["warm"], in_turn)
            times = {}
            for name, some, pool in (("many", cells, Batched()), ("single", cells[:: len(cells) // single], in_turn)):
                start = time.perf_counter()
                found = complete(some, work[name], pool)
                times[name] = (time.perf_counter() - start) / len(some) * len(cells)
                print(method, name, len(some), "cells", f"{times[name]:.1f} s for {len(cells)}", flush=True)
        done = sum(r.status == "done" for r in found)
        result[method] = {
            **times,
            "ratio": times["single"] / times["many"],
            "single cells timed": len(some),
            "of them done": done,
        }
    TARGET.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--single", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.data_dir, arguments.steps, arguments.single)
