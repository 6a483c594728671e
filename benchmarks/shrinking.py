"""How much faster training gets as units die: PathProx with shrink_every on the shipped MNIST digits, in one run.

    python benchmarks/shrinking.py [--threads 1] [--out benchmarks/shrinking.json]

Steps of the network as it became are timed alternately with steps of one at the full size, so that whatever slows the
machine down slows both. Absolute times say more about the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.experiments.data import mnist_subset
from pathprox.experiments.models import MLP

WIDTH, STEPS, LR, WEIGHT_DECAY, BATCH = 300, 1500, 0.2, 6e-3, 100


def start(shrink: bool):
    """(model, optimizer, regulariser), the same every time."""
    torch.manual_seed(0)
    model = MLP(3, WIDTH, factorized=True)
    units = pathprox.find_units(model, torch.zeros(1, 1, 28, 28))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"shrink_every": 50, "patience": 20} if shrink else {}
    return model, optimizer, pathprox.PathProx(units, WEIGHT_DECAY, **options).attach(optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.perf_counter() - began


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("shrinking.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = mnist_subset()["train"]
    full, full_optimizer, _ = start(shrink=False)
    model, optimizer, prox = start(shrink=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        some = torch.randint(0, len(data), (BATCH,))
        step(model, optimizer, data.images[some], data.labels[some])
        schedule.step()
    prox.shrink_every = None
    pairs = []
    for _ in range(300):
        some = torch.randint(0, len(data), (BATCH,))
        batch = data.images[some], data.labels[some]
        pairs.append((step(full, full_optimizer, *batch), step(model, optimizer, *batch)))
    first, last = (statistics.median(times) for times in zip(*pairs[20:], strict=True))
    record = {
        "parameters": {"at the start": numel(full), "at the end": numel(model)},
        "units": {"at the start": [WIDTH] * len(prox.units), "at the end": [len(g) for g in prox.units]},
        "step time, start / end": round(first / last, 2),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
