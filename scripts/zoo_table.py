"""The records of the zoo as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

INTRO = """\
# The zoo: does it hold for models that people use?

{count} architectures with random weights (nothing is downloaded), small inputs and, where one can choose, few layers.
Parameters that start as a constant are drawn at random first, and batch norm's statistics near those of random inputs.
Each model is then taken through the same steps (`make zoo`, seed {seed}):

1. `find_units` on one batch of two random samples;
2. a third of the units of every group is killed, at random: half of them unheard (all that they feed is zero), half
   silent (all that feeds them is zero); units that are not homogeneous all unheard. Attention heads die as a whole;
3. `shrink`;
4. the small model and the original are compared on three other random batches. *exact*: outputs differ by at most 1e-10
   of the largest one in float64 (1e-5 where a model computes in float32 inside, which its row says).

Seconds are those of `find_units` and `shrink` together, on one thread. "Kept" are groups with dead units that `shrink`
left in the model, and the most frequent reason. This page is written from records by `scripts/zoo.py --table`.

Made with {versions}.
"""
HEADINGS = {
    "homogeneous units": "Homogeneous units: `find_units(model, inputs)`",
    "all units": "All units that can be removed: `find_units(model, inputs, homogeneous_only=False)`",
}
HEAD = ("source", "model", "parameters", "groups", "units", "seconds", "dead", "removed")
HEAD += ("parameters after", "largest difference", "result and what was refused")
RIGHT = range(2, 10)


def table(records: Sequence[Record]) -> str:
    """The whole page: how it was done, a summary and a row for each model."""
    if not records:
        raise ValueError("there are no records. Run scripts/zoo.py --out FOLDER first.")
    models = {(r["source"], r["model"]) for r in records}
    seeds = ", ".join(sorted({str(r["seed"]) for r in records}))
    parts = [INTRO.format(count=len(models), seed=seeds, versions=_versions(records))]
    for asked, heading in HEADINGS.items():
        chosen = sorted((r for r in records if r["asked"] == asked), key=lambda r: (r["source"], r["model"]))
        if chosen:
            parts += [f"## {heading}\n", _summary(chosen), _markdown(HEAD, [_row(r) for r in chosen])]
    return "\n".join(parts)


def _versions(records: Sequence[Record]) -> str:
    found: dict[str, set[str]] = {}
    for record in records:
        for library, version in record["versions"].items():
            found.setdefault(library, set()).add(version or "none")
    return ", ".join(f"{library} {' and '.join(sorted(versions))}" for library, versions in found.items())


def _summary(records: Sequence[Record]) -> str:
    """How many models ended in which way, for each source."""
    sources = sorted({r["source"] for r in records})
    counts = Counter((_kind(r), r["source"]) for r in records)
    kinds = Counter(_kind(r) for r in records).most_common()
    rows = [(kind, *(str(counts[kind, s]) for s in sources), str(total)) for kind, total in kinds]
    total = ("all", *(str(sum(r["source"] == s for r in records)) for s in sources), str(len(records)))
    removed = sum(r.get("removed", 0) for r in records)
    dead = sum(r.get("dead", 0) for r in records)
    units = sum(r.get("units", 0) for r in records)
    words = f"{units:,} units were found, {dead:,} were killed, and {removed:,} are gone from the small models.\n"
    return _markdown(("result", *sources, "all"), [*rows, total], range(1, len(sources) + 2)) + "\n" + words


def _kind(record: Record) -> str:
    return record["status"].partition(":")[0]


def _row(record: Record) -> tuple[str, ...]:
    def number(key: str) -> str:
        return f"{record[key]:,}" if key in record else ""

    return (
        record["source"],
        record["model"],
        number("parameters"),
        number("groups"),
        number("units"),
        f"{sum(record['seconds'].values()):.1f}" if record["seconds"] else "",
        number("dead"),
        number("removed"),
        number("parameters_after"),
        f"{record['difference']:.1e}" if "difference" in record else "",
        _words(record),
    )


def _words(record: Record) -> str:
    said = [record["status"]]
    if record.get("precision") == "float32":
        said.append("float32 inside")
    if record.get("refused"):
        said.append(f"{record['refused']} groups kept: {next(iter(record['refused_reasons']), '')}")
    if record.get("unproved"):
        said.append(f"{record['unproved']} layers not proved: {next(iter(record['unproved_examples'].values()))}")
    return "; ".join(text if len(text) <= 160 else text[:157] + "..." for text in said).replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = RIGHT) -> str:
    rule = ["--:" if i in right else "---" for i in range(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))
