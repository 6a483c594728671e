"""What a training step costs on a CPU with PathProx, with Torch-Pruning and with torchao's pruning-aware training.

    python benchmarks/peers.py [--threads 1] [--processes 10] [--repeats 50] [--out benchmarks/peers.json]

All train the same small VGG on the same batch with SGD and momentum, each as its own documentation shows:

- SGD: torch's own weight decay. The others are compared with it.
- PathProx: attached to the optimizer; its work is done in `optimizer.step()`.
- Torch-Pruning: `regularize(model)` of a `GroupNormPruner` between `backward()` and `optimizer.step()`. It estimates
  the importance of every channel and adds a pull to the gradients, the stronger the less important a channel is.
  (`BNScalePruner` needs batch norms, which this network does not have.)
- torchao: a `PruneOptimizer` around the optimizer. In every step it restores the latent weights, takes the optimizer's
  step, saves them, and takes the proximal step of a group lasso on the rows of each layer.

torchao keeps the optimizer's weight decay and Torch-Pruning does without, as in their examples. In every repeat each
takes one step, in an order that rotates, so that whatever slows the machine down slows all; the medians are compared.
"quartiles" are those of the ratio within one repeat. Where in memory a network lies makes a difference of one or two
per cent in its passes, so this is done in several processes, one after the other, which make the networks in another
order each. Absolute times say more about the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pathprox
from pathprox.experiments.models import VGG

SMALL_VGG = (32, 32, "M", 64, 64, "M", 128, 128, "M", 128, 128, "M", 128, 128, "M")
BATCH, LR, MOMENTUM, WEIGHT_DECAY, WARM = 64, 0.01, 0.9, 1e-4, 15
Step = Callable[[], None]
"""What is done after `backward()`."""


def sgd(parameters, weight_decay: float = WEIGHT_DECAY) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=weight_decay)


def with_sgd(model: nn.Module, x: Tensor) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = sgd(model.parameters())
    return optimizer, optimizer.step


def with_pathprox(model: nn.Module, x: Tensor) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = sgd(model.parameters(), weight_decay=0)
    pathprox.PathProx(pathprox.find_units(model, x[:1]), WEIGHT_DECAY).attach(optimizer)
    return optimizer, optimizer.step


def with_torch_pruning(model: nn.Module, x: Tensor) -> tuple[torch.optim.Optimizer, Step]:
    import torch_pruning

    optimizer = sgd(model.parameters(), weight_decay=0)
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2, normalizer="max")
    pruner = torch_pruning.pruner.GroupNormPruner(
        model, x[:1], importance=importance, reg=5e-4, ignored_layers=[model.classifier]
    )
    pruner.update_regularizer()

    def step() -> None:
        pruner.regularize(model)
        optimizer.step()

    return optimizer, step


def with_torchao(model: nn.Module, x: Tensor) -> tuple[torch.optim.Optimizer, Step]:
    from torchao.prototype.pat.optim import PruneOptimizer

    named = list(model.named_parameters())
    rows = [p for name, p in named if name.endswith("weight")]
    others = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": rows, "group_type": "Dim0Grouper", "prox_type": "ProxGroupLasso"}, {"params": others}]
    optimizer = PruneOptimizer(sgd(groups), warmup_steps=0, reg_lambda=2e-4)
    return optimizer, optimizer.step


CONTESTANTS = {
    "SGD": with_sgd,
    "PathProx": with_pathprox,
    "Torch-Pruning": with_torch_pruning,
    "torchao": with_torchao,
}


def runner(contestant) -> Callable[[], tuple[float, float]]:
    """A function that does one training step and returns (seconds of all, seconds after `backward()`)."""
    torch.manual_seed(0)
    model = VGG(SMALL_VGG)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    optimizer, finish = contestant(model, x)
    model.train()

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        middle = time.perf_counter()
        finish()
        end = time.perf_counter()
        assert loss.isfinite()
        return end - start, end - middle

    return step


Times = dict[str, list[tuple[float, float]]]


def measure(seed: int, repeats: int, threads: int) -> Times:
    """In one process."""
    torch.set_num_threads(threads)
    names = random.Random(seed).sample(list(CONTESTANTS), len(CONTESTANTS))
    steps = {name: runner(CONTESTANTS[name]) for name in names}
    for _ in range(WARM):
        for step in steps.values():
            step()
    times: Times = {name: [] for name in names}
    for i in range(repeats):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            times[name].append(steps[name]())
    return times


def measure_all(processes: int, repeats: int, threads: int) -> Times:
    """In several processes, one at a time."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = [pool.apply(measure, (seed, repeats, threads)) for seed in range(processes)]
    return {name: [row for times in found for row in times[name]] for name in CONTESTANTS}


def summary(times: Times, part: Callable[[float, float], float]) -> dict[str, dict[str, object]]:
    """Ratios to SGD: of the medians, and the quartiles of those within a repeat."""
    columns = {name: [part(*row) for row in rows] for name, rows in times.items()}
    base = columns["SGD"]
    found: dict[str, dict[str, object]] = {}
    for name, mine in columns.items():
        ratios = [a / b for a, b in zip(mine, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(mine) / statistics.median(base)
        found[name] = {"ratio to SGD": round(ratio, 3), "quartiles": [round(low, 3), round(high, 3)]}
        found[name]["ms"] = round(1000 * statistics.median(mine), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=50, help="in each process")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    times = measure_all(options.processes, options.repeats, options.threads)
    record = {
        "what": f"small VGG, batch {BATCH}, float32, SGD with momentum {MOMENTUM}; medians in one run, in turn",
        "machine": f"{platform.machine()} CPU, {options.threads} thread(s)",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "pathprox", "torch-pruning", "torchao")},
        },
        "repeats": options.processes * options.repeats,
        "processes": options.processes,
        "goal": {"PathProx, training step": 1.05},
        "training step": summary(times, lambda whole, after: whole),
        "forward and backward": summary(times, lambda whole, after: whole - after),
        "after backward()": summary(times, lambda whole, after: after),
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
