"""What PathProx costs on a GPU, against fused SGD with weight decay, against the memory, and in a whole training step.

    python benchmarks/step_gpu.py [--repeats 100] [--out benchmarks/step_gpu.json]

Everything is a CUDA graph, so that kernels are timed and not Python. In each repeat all are replayed, one after the
other, so that whatever slows the machine down slows all; medians are compared. "loop" is PathProx's general path: a few
operations for each layer, as the algorithm is written. The limit is the bytes that have to move at the speed of a large
copy, measured in the same run. For SGD: read weights, gradients and momentum, write weights and momentum. For PathProx
the same, and its weights, gradients and momentum once more before, since norms must be known before anything is scaled;
of weights that no unit owns the gradients alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import pathprox
from pathprox.experiments.models import MLP, VGG

WEIGHT_DECAY, LR, MOMENTUM = 1e-3, 1e-3, 0.9
INNER = 10
"""Replays in one measurement: events are too coarse for one."""
KINDS = ("SGD", "fused", "loop")
Found = tuple[nn.Module, pathprox.Units]


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Each with the shape of its input; the first number is the batch of the whole training step."""
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "MLP-3-400 factorized": (lambda: MLP(3, 400, factorized=True), (200, 784)),
        "VGG19": (VGG, (128, 3, 32, 32)),
        "VGG19, channels last": (lambda: VGG().to(memory_format=torch.channels_last), (128, 3, 32, 32)),
    }
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed: no ResNet-50, no ViT-B")
        return found
    from torchvision.models import resnet50, vit_b_16

    last = {"memory_format": torch.channels_last}
    return {
        **found,
        "ResNet-50, channels last": (lambda: resnet50().to(**last), (64, 3, 224, 224)),
        "ViT-B/16": (vit_b_16, (64, 3, 224, 224)),
    }


def prepared(found: Found, kind: str, momentum: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A copy on the GPU with its optimizer, and PathProx attached unless ``kind`` is SGD."""
    model, units = copy.deepcopy(found)
    model.cuda()
    decay = WEIGHT_DECAY if kind == "SGD" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=decay, fused=True)
    prox = None
    if kind != "SGD":
        prox = pathprox.PathProx(units, WEIGHT_DECAY).attach(optimizer)
        prox._fast.on = kind == "fused"
    return model, optimizer, prox


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def bytes_of(model: nn.Module, prox: Any, momentum: float) -> int:
    """What has to move in one step."""
    count = sum(p.numel() for p in model.parameters())
    moved = count * (5 if momentum else 3)
    if prox is not None:
        layout = prox._fast.step.layout
        owned = sum(p.parameter.numel() for p in layout.pieces[: layout.measured])
        moved += owned * (3 if momentum else 2) + (count - owned)
    return 4 * moved


def milliseconds(run: Callable[[], object], inner: int = INNER) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / inner


def medians(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int, inner: int = INNER) -> dict[str, float]:
    for graph in graphs.values():
        milliseconds(graph.replay, inner)
    times: dict[str, list[float]] = {kind: [] for kind in graphs}
    for _ in range(repeats):
        for kind, graph in graphs.items():
            times[kind].append(milliseconds(graph.replay, inner))
    return {kind: statistics.median(values) for kind, values in times.items()}


def bandwidth(repeats: int) -> float:
    """Bytes a second of a copy too large for any cache, read and write both counted."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source)) for _ in range(max(repeats // 10, 5))]
    return 2 * 4 * source.numel() / (statistics.median(times) / 1000)


def kernels(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Microseconds in each kernel, as the profiler sees them."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(INNER):
            graph.replay()
        torch.cuda.synchronize()
    events = [event for event in seen.key_averages() if event.device_time_total]
    return {event.key[:60]: round(event.device_time_total / INNER, 1) for event in events}


def steps(found: Found, momentum: float, repeats: int, speed: float) -> dict[str, object]:
    """optimizer.step() alone, with gradients that are there."""
    graphs, kept, least = {}, [], {}
    for kind in KINDS:
        model, optimizer, prox = prepared(found, kind, momentum)
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
        graphs[kind] = captured(optimizer.step)
        kept.append((model, optimizer, prox))
        if kind != "loop":
            least[kind] = 1000 * bytes_of(model, prox, momentum) / speed
    ms = medians(graphs, repeats)
    whole = kept[1][2]._fast.step.whole is not None
    return {
        "parameters": sum(p.numel() for p in found[0].parameters()),
        "SGD's step in the same kernels": whole,
        "ms a step": {kind: round(t, 4) for kind, t in ms.items()},
        "ms by memory alone": {kind: round(t, 4) for kind, t in least.items()},
        "ratio to SGD": round(ms["fused"] / ms["SGD"], 3),
        "ratio to the limit": round(ms["fused"] / least["fused"], 3),
        "loop / fused": round(ms["loop"] / ms["fused"], 2),
        "microseconds in kernels": kernels(graphs["fused"]),
    }


def training(found: Found, shape: tuple[int, ...], precision: str, repeats: int) -> dict[str, object]:
    """A whole training step, with momentum."""
    x, y = torch.randn(shape, device="cuda"), torch.randint(0, 10, shape[:1], device="cuda")
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    graphs, kept = {}, []
    for kind in ("SGD", "fused"):
        model, optimizer, prox = prepared(found, kind, MOMENTUM)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        graphs[kind] = captured(step)
        kept.append((model, optimizer, prox))
    ms = medians(graphs, repeats, inner=3)
    return {
        "batch": shape[0],
        "ms a step": {kind: round(t, 4) for kind, t in ms.items()},
        "ratio to SGD": round(ms["fused"] / ms["SGD"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("step_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; benchmarks/step.py is for the CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    speed = bandwidth(options.repeats)
    record: dict[str, Any] = {
        "what": "CUDA graphs, medians; SGD is fused and has weight decay; weights in float32",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "repeats": options.repeats,
        "copy, GB/s": round(speed / 1e9),
        "optimizer.step()": {},
        "training step, momentum 0.9": {},
    }

    def note(part: str, name: str, found: dict[str, object]) -> None:
        record[part][name] = found
        print(name, json.dumps(found), flush=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")

    for name, (make, shape) in networks().items():
        torch.manual_seed(0)
        model = make()
        found = model, pathprox.find_units(model, torch.randn(1, *shape[1:]))  # on the CPU
        for momentum in (MOMENTUM, 0.0):
            timed = steps(found, momentum, options.repeats, speed)
            note("optimizer.step()", f"{name}, momentum {momentum:g}", timed)
        if name in ("VGG19, channels last", "ResNet-50, channels last"):
            for precision in ("tf32", "bf16"):
                timed = training(found, shape, precision, max(options.repeats // 4, 10))
                note("training step, momentum 0.9", f"{name}, {precision}", timed)


if __name__ == "__main__":
    main()
