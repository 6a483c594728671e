"""Write the tables of docs/speed.md from the records beside this file.

    python benchmarks/page.py [--page docs/speed.md]

The page holds marks `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced. A record that is not
there, or of another form, gives a line that says so.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "speed.md"
GOAL = 1.05
"""A training step on a CPU, against SGD with weight decay."""
STEP_GOALS = (1.5, 1.3, 5.0)
"""`optimizer.step()` on a GPU, with momentum: against fused SGD, against the memory, and how much slower a loop is."""
TRAINING_GOAL = 1.02
"""A training step on a GPU, against fused SGD with weight decay."""
GRID_GOAL = 15.0
"""How much faster a whole grid is than its cells one by one."""
Record = dict[str, Any]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def against_goal(ratio: float, goal: float = GOAL) -> str:
    return "met" if ratio <= goal else "missed"


def peers(record: Record) -> str:
    """The small VGG with PathProx and with the peers."""
    whole, network, after = (record[part] for part in ("training step", "forward and backward", "after backward()"))

    def row(name: str) -> list[object]:
        mine = whole[name]
        low, high = mine["quartiles"]
        goal = against_goal(mine["ratio to SGD"]) if name == "PathProx" else ""
        ratio, same = (f"{part[name]['ratio to SGD']:.3f}" for part in (whole, network))
        return [name, ratio, f"{low:.2f} to {high:.2f}", goal, same, f"{after[name]['ms']:.1f} ms"]

    versions = record["versions"]
    note = (
        f"{record['what']}; {record['repeats']} repeats in {record['processes']} processes; {record['machine']}; "
        + ", ".join(f"{name} {versions[name]}" for name in ("torch", "torch-pruning", "torchao"))
    )
    goal = f"goal: {GOAL}"
    head = ("", "training step, SGD = 1", "quartiles", goal, "forward and backward alone", "after `backward()`")
    return f"{table(head, map(row, whole))}\n\n({note}.)"


def step(record: Record) -> str:
    """PathProx against the same optimizer's own weight decay."""
    rows = [
        [name, f"{r['training step']:.2f}", f"{r['optimizer step']:.2f}", against_goal(r["training step"])]
        for name, r in record["ratios"].items()
    ]
    note = f"{record['machine']}, {record['repeats']} repeats"
    return f"{table(('', 'training step', '`optimizer.step()`', f'goal: {GOAL}'), rows)}\n\n({note}.)"


def step_gpu(record: Record) -> str:
    """`optimizer.step()` on a GPU: against fused SGD and against the memory."""

    def row(name: str, r: Record) -> list[object]:
        ratios = r["ratio to SGD"], r["ratio to the limit"], r["loop / fused"]
        sgd, memory, loop = STEP_GOALS
        met = (ratios[0] <= sgd, ratios[1] <= memory, ratios[2] >= loop)
        aimed = name.endswith("momentum 0.9") and not name.startswith("MLP")
        goals = ", ".join("met" if fine else "missed" for fine in met) if aimed else ""
        return [name, f"{r['ms a step']['fused']:.3f}", *(f"{ratio:.2f}" for ratio in ratios), goals]

    rows = [row(name, r) for name, r in record["optimizer.step()"].items()]
    goals = "goals: {:g}, {:g}, {:g}".format(*STEP_GOALS)
    head = ("", "ms", "fused SGD = 1", "memory alone = 1", "one layer after the other", goals)
    note = f"{record['machine']}, a copy moves {record['copy, GB/s']} GB/s, {record['repeats']} repeats"
    return f"{table(head, rows)}\n\n({note}.)"


def kernels_gpu(record: Record) -> str:
    """What a profile finds in PathProx's `optimizer.step()`."""
    names = ("_measure", "_combine", "_decide", "_apply")
    rows = []
    for name, r in record["optimizer.step()"].items():
        seen = r["microseconds in kernels"]
        shown = [seen.get(kernel, 0.0) for kernel in names]
        rest = 1000 * r["ms a step"]["fused"] - sum(shown)
        limit = 1000 * r["ms by memory alone"]["fused"]
        rows.append([name, *(f"{t:.0f}" for t in (*shown, rest, limit))])
    return table(("microseconds", *(f"`{name}`" for name in names), "between them", "memory alone"), rows)


def training_gpu(record: Record) -> str:
    """A whole training step on a GPU."""
    rows = [
        [
            name,
            r["batch"],
            f"{r['ms a step']['fused']:.2f}",
            f"{r['ratio to SGD']:.3f}",
            against_goal(r["ratio to SGD"], TRAINING_GOAL),
        ]
        for name, r in record["training step, momentum 0.9"].items()
    ]
    return table(("", "batch", "ms", "fused SGD = 1", f"goal: {TRAINING_GOAL}"), rows)


def finding(record: Record) -> str:
    """Seconds of `find_units` by stage."""
    parts = ("trace", "labels", "proof")
    rows = []
    for name, r in record.items():
        if isinstance(r, dict) and "seconds" in r:
            seconds = r["seconds"]
            shown = [f"{seconds[part]:.1f}" for part in ("all", *parts)]
            rows.append([name, f"{r['parameters'] / 1e6:.0f}", r["units"], *shown])
    head = ("", "million parameters", "units", "seconds", *(f"of them {part}" for part in parts))
    return f"{table(head, rows)}\n\n({record['machine']}, torch {record['versions']['torch']}.)"


def shrinking(record: Record) -> str:
    """A training step after units were removed."""
    sizes, ratio = record["parameters"], record["step time, start / end"]
    rows = [[f"{sizes['at the start']:,}", f"{sizes['at the end']:,}", f"1/{ratio:g}"]]
    head = ("parameters at the start", "at the end", "time of a step")
    return f"{table(head, rows)}\n\n({record['threads']} thread(s), torch {record['torch']}.)"


def shrinking_gpu(record: Record) -> str:
    """Two runs on a GPU, with removals and without."""
    rows = []
    for without, with_ in zip(record["without"], record["with"], strict=True):
        seconds = [look["seconds"] for look in (without, with_)]
        times = [*seconds, with_["of them removing"]]
        tests = [f"{look['test']:.1f}" for look in (without, with_)]
        ratio, left = f"{seconds[0] / seconds[1]:.2f}", f"{with_['parameters'] / 1e6:.1f}"
        rows.append([with_["epoch"], *(f"{t:.0f}" for t in times), ratio, *tests, left])
    head = ("epoch", "seconds without", "with", "of them removing", "ratio", "test without", "with", "million weights")
    return f"{table(head, rows)}\n\n({record['what']}; {record['machine']}.)"


def grid(record: Record) -> str:
    """All cells of a grid as one program."""
    rows = [
        [method, f"{r['many']:.0f}", f"{r['single']:.0f}", f"{r['ratio']:.1f}", against_goal(GRID_GOAL, r["ratio"])]
        for method, r in record.items()
        if isinstance(r, dict) and "ratio" in r
    ]
    head = ("", "seconds as one program", "seconds one by one", "ratio", f"goal: {GRID_GOAL:g}")
    return f"{table(head, rows)}\n\n({record['device']}, torch {record['torch']}, {record['steps']} steps.)"


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "peers": ("peers", peers),
    "step": ("step", step),
    "step on a GPU": ("step_gpu", step_gpu),
    "kernels on a GPU": ("step_gpu", kernels_gpu),
    "training step on a GPU": ("step_gpu", training_gpu),
    "finding": ("finding", finding),
    "shrinking": ("shrinking", shrinking),
    "shrinking on a GPU": ("shrinking_gpu", shrinking_gpu),
    "grid": ("grid_gpu", grid),
}


def made(name: str) -> str:
    source, make = TABLES[name]
    path = FOLDER / f"{source}.json"
    try:
        return make(json.loads(path.read_text()))
    except (FileNotFoundError, KeyError):
        return f"(There is no record of this yet: `python benchmarks/{source}.py` makes one.)"


def filled(text: str) -> str:
    return re.sub(
        r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{made(found[2])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    page = parser.parse_args().page
    page.write_text(filled(page.read_text()))
