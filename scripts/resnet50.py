# ruff: noqa: T201
"""ResNet-50 at 224x224: how long it takes to trace it, to prove its units and to shrink it, and the memory.

python scripts/resnet50.py [--threads 2] [--out results/resnet50.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from zoo_check import kill_, relative
from zoo_models import declare_operators

import pathprox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/resnet50.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = declare_operators()
    from torchvision.models import resnet50

    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = resnet50().eval()
    start = time.perf_counter()
    units = pathprox.find_units(model, torch.randn(1, 3, 224, 224, generator=random))
    found = time.perf_counter()
    kill_(units, random)
    killed = time.perf_counter()
    small = pathprox.shrink(model, units)
    end = time.perf_counter()
    other = torch.randn(2, 3, 224, 224, generator=random)
    with torch.no_grad():
        difference = relative([model(other)], [small(other)])
    record = {
        "groups": len(units),
        "units": sum(map(len, units)),
        "seconds": {"find_units": round(found - start, 1), "shrink": round(end - killed, 1)},
        "peak memory in GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "parameters": [sum(p.numel() for p in m.parameters()) for m in (model, small)],
        "largest difference, relative": difference,
        "threads": args.threads,
        "torch": torch.__version__.partition("+")[0],
        "operators declared by hand": library is not None,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
