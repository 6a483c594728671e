"""What a training step costs with PathProx, as a ratio to SGD with torch's own weight decay, in one run.

    python benchmarks/step.py [--threads 2] [--out benchmarks/step.json]

Both are timed alternately, many times; the medians are compared. Absolute times say more about the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.experiments.models import MLP, VGG

SMALL_VGG = (32, 32, "M", 64, 64, "M", 128, 128, "M", 128, 128, "M", 128, 128, "M")
NETWORKS = {
    "MLP-3-400 factorized, batch 200": (lambda: MLP(3, 400, factorized=True), (200, 784)),
    "small VGG, batch 64": (lambda: VGG(SMALL_VGG), (64, 3, 32, 32)),
}
OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.01, **k),
    "SGD momentum": lambda p, **k: torch.optim.SGD(p, lr=0.01, momentum=0.9, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=1e-4, **k),
}


def runner(make_model, shape, make_optimizer, pathprox_on: bool):
    """A function that does one training step and returns (seconds of all, seconds of optimizer.step)."""
    torch.manual_seed(0)
    model = make_model()
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    if pathprox_on:
        optimizer = make_optimizer(model.parameters())
        pathprox.PathProx(pathprox.find_units(model, x[:1]), 1e-4).attach(optimizer)
    else:
        optimizer = make_optimizer(model.parameters(), weight_decay=1e-4)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        middle = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start, time.perf_counter() - middle

    return step


def compare(make_model, shape, make_optimizer, repeats: int) -> dict[str, float]:
    rivals = [runner(make_model, shape, make_optimizer, on) for on in (False, True)]
    for step in rivals * 3:
        step()
    times = [[step() for step in rivals] for _ in range(repeats)]
    medians = [[statistics.median(row[i][k] for row in times) for k in (0, 1)] for i in (0, 1)]
    return {"training step": medians[1][0] / medians[0][0], "optimizer step": medians[1][1] / medians[0][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "step.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = {
        "what": "time with PathProx / time with SGD's (Adam's) own weight decay, medians in one run",
        "machine": f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}",
        "repeats": options.repeats,
        "ratios": {},
    }
    for network, (make_model, shape) in NETWORKS.items():
        for name, make_optimizer in OPTIMIZERS.items():
            ratios = compare(make_model, shape, make_optimizer, options.repeats)
            record["ratios"][f"{network}, {name}"] = {k: round(v, 3) for k, v in ratios.items()}
            print(f"{network:34} {name:14}", "  ".join(f"{k} x{v:.2f}" for k, v in ratios.items()), flush=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
