"""What optimizer.step() costs with PathProx on a GPU, against fused SGD with weight decay, and against the memory.

    python benchmarks/step_gpu.py [--repeats 200] [--out benchmarks/step_gpu.json]

Every step is a CUDA graph of its own, so that kernels are timed and not Python. In each repeat all are replayed, one
after the other, so that whatever slows the machine down slows all; medians are compared. The limit is the bytes that
have to move (SGD: read weights, gradients and momentum, write weights and momentum; PathProx: read its weights once for
the norms, read and write them once to scale, and the momentum of what the balance rescales) at the speed of a large
copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import pathprox
from pathprox.experiments.models import MLP, VGG

WEIGHT_DECAY, LR, MOMENTUM = 1e-3, 1e-3, 0.9
INNER = 10
"""Replays in one measurement: events are too coarse for one."""


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "MLP-3-400 factorized": (lambda: MLP(3, 400, factorized=True), (1, 784)),
        "VGG19": (VGG, (1, 3, 32, 32)),
        "VGG19, channels last": (lambda: VGG().to(memory_format=torch.channels_last), (1, 3, 32, 32)),
    }
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed: no ResNet-50, no ViT-B")
        return found
    from torchvision.models import resnet50, vit_b_16

    return {**found, "ResNet-50": (resnet50, (1, 3, 224, 224)), "ViT-B/16": (vit_b_16, (1, 3, 224, 224))}


def stepper(make: Callable[[], nn.Module], shape: tuple[int, ...], kind: str, momentum: float):
    """(a CUDA graph of one step, the bytes that it has to move, whether in kernels of its own, what must not go)"""
    torch.manual_seed(0)
    model = make()
    units = pathprox.find_units(model, torch.randn(shape)) if kind != "SGD" else None  # on the CPU
    model.cuda()
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    decay = WEIGHT_DECAY if units is None else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=decay, fused=True)
    count = sum(p.numel() for p in model.parameters())
    moved = 4 * count * (5 if momentum else 3)
    prox = None
    if units is not None:
        prox = pathprox.PathProx(units, WEIGHT_DECAY).attach(optimizer)
        prox._fast = kind == "fast"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    swept = False
    if prox is not None and prox._fused is not None:
        swept, layout = prox._fused._tables is not None, prox._fused.layout
        sizes = [p.parameter.numel() for p in layout.pieces]
        states = sum(p.parameter.numel() for p in layout.states) if momentum else 0
        moved += 4 * (sum(sizes[: layout.measured]) + 2 * sum(sizes) + 2 * states)
        moved += 4 * count  # the guard looks at the gradients
    return graph, moved, swept, (model, optimizer, prox)


def milliseconds(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(INNER):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / INNER


def bandwidth(repeats: int) -> float:
    """Bytes a second of a copy too large for any cache, read and write both counted."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source)) for _ in range(max(repeats // 10, 5))]
    return 2 * 4 * source.numel() / (statistics.median(times) / 1000)


def compare(make, shape, momentum: float, repeats: int, speed: float) -> dict[str, object]:
    kinds = ("SGD", "fast", "slow")
    steppers = {kind: stepper(make, shape, kind, momentum) for kind in kinds}
    for _ in range(20):
        for graph, *_ in steppers.values():
            graph.replay()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, (graph, *_) in steppers.items():
            times[kind].append(milliseconds(graph.replay))
    medians = {kind: statistics.median(times[kind]) for kind in kinds}
    least = {kind: 1000 * steppers[kind][1] / speed for kind in ("SGD", "fast")}
    return {
        "parameters": sum(p.numel() for p in steppers["SGD"][3][0].parameters()),
        "Triton kernels": steppers["fast"][2],
        "ms a step": {kind: round(medians[kind], 4) for kind in kinds},
        "ms by memory alone": {kind: round(least[kind], 4) for kind in least},
        "ratio to SGD": {kind: round(medians[kind] / medians["SGD"], 3) for kind in ("fast", "slow")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("step_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; benchmarks/step.py is for the CPU")
    speed = bandwidth(options.repeats)
    record: dict[str, object] = {
        "what": "optimizer.step() in a CUDA graph, float32, medians; SGD is fused and has weight decay",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "repeats": options.repeats,
        "copy, GB/s": round(speed / 1e9),
    }
    for name, (make, shape) in networks().items():
        for momentum in (0.0, MOMENTUM):
            found = compare(make, shape, momentum, options.repeats, speed)
            record[f"{name}, momentum {momentum:g}"] = found
            print(f"{name}, momentum {momentum:g}", json.dumps(found), flush=True)
            options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
