# ruff: noqa: T201
"""Does it hold for models that people use? Find units, kill a third, shrink, compare: a record for each model.

    python scripts/zoo.py --out results/zoo [--only NAME ...] [--workers 2] [--limit 300] [--all-units] [--again]
    python scripts/zoo.py --out results/zoo --table docs/zoo.md

Each model has a process of its own, with limits of time and memory; a hang or a crash becomes a record that says so.
Models that have a record are skipped. The table is made from the records alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from zoo_table import table


def main() -> None:
    options = _parser().parse_args()
    if options.table:
        records = [json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))]
        options.table.write_text(table(records))
    elif options.one:
        resource.setrlimit(resource.RLIMIT_DATA, (int(options.memory * 1e9), resource.RLIM_INFINITY))
        _check(options.one, options.all_units, _path(options.out, options.one, options.all_units))
    else:
        _run_all(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/zoo"), help="folder of the records")
    parser.add_argument("--table", type=Path, help="write the table to this file and do nothing else")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="models, or patterns with *")
    parser.add_argument("--workers", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for one model")
    parser.add_argument("--memory", type=float, default=8, metavar="GB", help="for one model")
    parser.add_argument("--all-units", action="store_true", help="also try units that are not homogeneous")
    parser.add_argument("--again", action="store_true", help="also models that have a record")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def _run_all(options: argparse.Namespace) -> None:
    from zoo_models import NAMES

    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [n for n in NAMES if any(fnmatch.fnmatch(n, p) or n.split("/")[1] == p for p in options.only)]
    jobs = [(name, kind) for name in wanted for kind in ([False, True] if options.all_units else [False])]
    jobs = [job for job in jobs if options.again or not _path(options.out, *job).exists()]
    print(f"{len(wanted)} models, {len(jobs)} checks to do", flush=True)
    with ThreadPoolExecutor(options.workers) as pool:
        for done in as_completed([pool.submit(_run, *job, options) for job in jobs]):
            print(done.result(), flush=True)


def _run(name: str, all_units: bool, options: argparse.Namespace) -> str:
    """Check one model in a process of its own; returns a line to print."""
    path = _path(options.out, name, all_units)
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--out", str(options.out), "--memory", str(options.memory)]
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command + ["--all-units"] * all_units,
            env=os.environ | quiet,
            timeout=options.limit,
            capture_output=True,
            text=True,
        )
        trouble = _last_words(done)
    except subprocess.TimeoutExpired:
        trouble = f"time limit: {options.limit:.0f} s"
    if not path.exists():
        _write(path, _known(name, all_units, path) | {"status": trouble})
    _part(path).unlink(missing_ok=True)
    record = json.loads(path.read_text())
    seconds = " + ".join(f"{s:.1f}" for s in record["seconds"].values())
    asked = " (all units)" if all_units else ""
    return f"{name + asked:44} {record.get('units', 0):6} units  {seconds:>13} s  {record['status']}"


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"crashed: {signal.Signals(-done.returncode).name}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"crashed: {lines[-1] if lines else f'exit status {done.returncode}'}"


def _check(name: str, all_units: bool, path: Path) -> None:
    from zoo_check import check

    _write(path, check(name, all_units, note=lambda record: _part(path).write_text(json.dumps(record))))


def _known(name: str, all_units: bool, path: Path) -> dict:
    """What a process that did not end well has noted."""
    from zoo_check import blank

    return json.loads(_part(path).read_text()) if _part(path).exists() else blank(name, all_units)


def _path(folder: Path, name: str, all_units: bool) -> Path:
    return folder / f"{name.replace('/', '-')}{'-all' if all_units else ''}.json"


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _write(path: Path, record: dict) -> None:
    """Whole or not at all: a record that is there is complete."""
    whole = path.with_suffix(".whole")
    whole.write_text(json.dumps(record, indent=2) + "\n")
    whole.rename(path)


if __name__ == "__main__":
    main()
