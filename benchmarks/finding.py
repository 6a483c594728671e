"""How long finding units takes, stage by stage, and where the time goes.

    python benchmarks/finding.py [--threads 1] [--repeats 5] [--out benchmarks/finding.json]

Each network is looked at several times; the run with the median total counts. The stages are those of
`pathprox.discover`: a float64 copy and a first call of it, the trace by `torch.export`, labels through the graph,
groups, and the proof with its parts (drawing weights; all tests at once, in evaluation and in training mode; the
gradient). Then once more under `cProfile`: the functions that most of the time is spent in, without what they call.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib.util
import json
import platform
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import pathprox
from pathprox import discover
from pathprox.discover.proof import Proof
from pathprox.experiments.models import VGG

STAGES = {
    "copy in float64": (discover, "double"),
    "trace": (discover, "trace"),
    "labels": (discover, "follow"),
    "groups": (discover, "collect"),
    "proof": (Proof, "run"),
    "proof: weights drawn": (Proof, "_draw"),
    "proof: in evaluation mode": (Proof, "_try"),
    "proof: in training mode": (Proof, "_try_in_training"),
    "proof: gradient": (Proof, "_reached"),
    "couplings": (discover, "choose_couplings"),
}
TOP = 12


class Block(nn.Module):
    """Pre-norm attention and an MLP with ReLU, both in a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def transformer(layers: int = 12, width: int = 768, heads: int = 12, words: int = 1000) -> nn.Module:
    blocks = [Block(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words))


def networks() -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    found: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "VGG19": (VGG, torch.randn(1, 3, 32, 32)),
        "transformer, 12 layers, width 768": (transformer, torch.randint(0, 1000, (1, 16))),
    }
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed: no ResNet-50")
        return found
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from zoo_models import declare_operators

    declare_operators()
    from torchvision.models import resnet50

    return {**found, "ResNet-50": (resnet50, torch.randn(1, 3, 224, 224))}


@contextmanager
def stopwatch(seconds: Counter[str]) -> Iterator[None]:
    """Add up the seconds spent in each stage. What one stage does inside another of the same kind counts once."""
    running: list[str] = []

    def timed(name: str, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            inner = any(name.startswith("proof: ") and other.startswith("proof: ") for other in running)
            running.append(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()
                if not inner:
                    seconds[name] += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for name, (where, attribute) in STAGES.items():
            stack.enter_context(patch.object(where, attribute, timed(name, getattr(where, attribute))))
        yield


def look(make: Callable[[], nn.Module], example: Tensor) -> tuple[dict[str, float], pathprox.Units]:
    torch.manual_seed(0)
    model = make()
    seconds: Counter[str] = Counter()
    start = time.perf_counter()
    with stopwatch(seconds):
        units = pathprox.find_units(model, example)
    total = time.perf_counter() - start
    return {"all": total, **{name: seconds[name] for name in STAGES}}, units


def profile(make: Callable[[], nn.Module], example: Tensor) -> list[dict[str, object]]:
    """The functions with the largest time of their own."""
    model = make()
    profiler = cProfile.Profile()
    profiler.runcall(pathprox.find_units, model, example)
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    largest = sorted(rows, key=lambda row: row[1][2], reverse=True)[:TOP]
    return [
        {"function": _name(*where), "calls": calls, "seconds": round(own, 3)}
        for where, (_, calls, own, _, _) in largest
    ]


def _name(file: str, line: int, function: str) -> str:
    parts = Path(file).parts
    start = max((i for i, part in enumerate(parts) if part in ("torch", "pathprox")), default=len(parts))
    return f"{'/'.join(parts[start:])}:{line} {function}" if start < len(parts) else function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, object] = {
        "what": "find_units, seconds; of each network the run with the median total",
        "machine": f"{platform.machine()} CPU, {options.threads} thread(s)",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "repeats": options.repeats,
    }
    pathprox.find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.randn(1, 2))  # torch warms up
    for name, (make, example) in networks().items():
        looks = sorted((look(make, example) for _ in range(options.repeats)), key=lambda pair: pair[0]["all"])
        seconds, units = looks[len(looks) // 2]
        record[name] = {
            "parameters": sum(p.numel() for p in units.model.parameters()),
            "units": sum(map(len, units)),
            "groups": len(units),
            "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
            "profile": profile(make, example),
        }
        print(name, json.dumps(record[name]["seconds"]), flush=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
