"""The panels of the figures: curves over the iterations, histograms, and accuracy against sparsity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathprox.experiments.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.lines import Line2D

COLOURS = {
    "weight-decay": "#2166ac",
    "pathprox": "#b2182b",
    "path-norm": "#e08214",
    "lasso": "#e08214",
    "group-lasso": "#4d4d4d",
}
"""Blue, red, orange and dark grey also differ in lightness, for those who cannot tell all hues."""
MARKERS = {"weight-decay": "o", "pathprox": "s", "lasso": "^", "group-lasso": "D"}
BLACK, GREY = "#222222", "#8c8c8c"
BINS = 40
DEEP = 15.0
"""Figure 4 shows that many points of accuracy below the best: the differences of interest are smaller than one."""

Shown = Mapping[str, Sequence[Record]]


def values(record: Record, name: str) -> list[float]:
    """A column of the history; what was not finite is a gap."""
    return [math.nan if v is None else v for v in record.history[name]]


def average(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """The steps at which all runs were looked at, and the mean over the runs there."""
    columns = [dict(zip(r.history["step"], values(r, name), strict=True)) for r in records]
    steps = sorted(set.intersection(*(set(c) for c in columns)))
    return steps, [statistics.fmean(c[s] for c in columns) for s in steps]


def best_lr(records: Sequence[Record]) -> list[Record]:
    """The runs with the learning rate whose balanced objective ends lowest, on average over its seeds."""
    cells: dict[float, list[Record]] = {}
    for record in records:
        cells.setdefault(record.recipe.lr, []).append(record)

    def end(lr: float) -> tuple[float, float]:
        mean = statistics.fmean(values(r, "balanced")[-1] for r in cells[lr])
        return (mean if math.isfinite(mean) else math.inf), lr

    return cells[min(cells, key=end)]


def key(colour: str, label: str, style: Any = "-", width: float = 1.6, marker: str = "") -> Line2D:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label, linestyle=style, linewidth=width, marker=marker, markersize=4)


def curve(axes: Axes, records: Sequence[Record], name: str, colour: str, style: str = "-", width: float = 1.6) -> None:
    """A thin line for each run where there are several, and a thick one for their mean."""
    if len(records) > 1:
        for record in records:
            axes.plot(record.history["step"], values(record, name), style, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(*average(records, name), style, color=colour, linewidth=width)


def over_iterations(axes: Axes, shown: Shown) -> None:
    """The axis below curves."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    last = max(r.history["step"][-1] for runs in shown.values() for r in runs)
    axes.set(xlabel="iterations", xlim=(0, last))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def objective(axes: Axes, shown: Shown, loss: bool = False) -> None:
    """F as it is and at its least over all rescalings, and the data loss below it."""
    for method, runs in shown.items():
        if loss:
            curve(axes, runs, "loss", GREY)
        curve(axes, runs, "objective", COLOURS[method], "--")
        curve(axes, runs, "balanced", COLOURS[method])
    axes.set_yscale("log")
    axes.set_title("weight-decay objective F")
    over_iterations(axes, shown)


def active_units(axes: Axes, shown: Shown) -> None:
    for place, (method, runs) in enumerate(shown.items()):
        # where both have all their units, the lower line is still to be seen
        curve(axes, runs, "active", COLOURS[method], width=1.6 if place else 4)
    axes.set_title("active units (%)")
    axes.set_ylim(top=101)
    over_iterations(axes, shown)


def lipschitz(panel: SubFigure, shown: Shown) -> None:
    """Local Lipschitz constants of all seeds together before and after training, and their median in between."""
    curves = {m: [r for r in runs if "lipschitz" in r.history] for m, runs in shown.items()}
    curves = {method: runs for method, runs in curves.items() if runs}
    panels = panel.subplots(3 if curves else 2, 1)
    _histograms(panels[:2], shown)
    for method, runs in curves.items():
        curve(panels[2], runs, "lipschitz", COLOURS[method])
    if curves:
        least = min(v for runs in curves.values() for r in runs for v in values(r, "lipschitz")[1:])
        panels[2].set(title="their median in between", ylim=(0.95 * least, None))  # the start is far below
        over_iterations(panels[2], curves)


def _histograms(panels: Any, shown: Shown) -> None:
    for axes, when in zip(panels, ("start", "end"), strict=True):
        axes.set_title(f"local Lipschitz constants at the {when}")
        pooled = {m: [v for r in runs for v in r.final.get("lipschitz", {}).get(when, ())] for m, runs in shown.items()}
        found = {method: constants for method, constants in pooled.items() if constants}
        if not found:
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color=GREY)
            continue
        bins = np.histogram_bin_edges(np.concatenate([np.asarray(v) for v in found.values()]), BINS)
        for method, constants in found.items():
            share = np.full(len(constants), 100 / len(constants))
            drawn = {"bins": bins, "weights": share, "color": COLOURS[method]}
            axes.hist(constants, histtype="stepfilled", alpha=0.25, **drawn)
            axes.hist(constants, histtype="step", linewidth=1.2, **drawn)
        axes.set_ylabel("images (%)")
    panels[1].set_xlabel("spectral norm of the Jacobian")


Solution = tuple[float, float, float]
"""Of a cut network: active units, validation and test accuracy, in percent."""
Stair = tuple[float, float]
"""From that share of active units on, that test accuracy."""


def solutions(records: Sequence[Record]) -> list[Solution]:
    """All cut networks that still have units."""
    cuts = [s for r in records for s in r.final.get("pruned", ())]
    return [(s["active"], s["val"], s["test"]) for s in cuts if s["active"] > 0]


def complete(records: Sequence[Record]) -> list[Record]:
    """The runs with those seeds that have the most cells of the grid: the best of few is no match for that of many."""
    cells: dict[int, set[tuple[float, float]]] = {}
    for record in records:
        cells.setdefault(record.seed, set()).add((record.recipe.lr, record.recipe.weight_decay))
    most = max(map(len, cells.values()), default=0)
    return [r for r in records if len(cells[r.seed]) == most]


def staircase(found: Sequence[Solution]) -> list[Stair]:
    """For each sparsity s the test accuracy of the solution with the best validation accuracy among those up to s.

    Only where it changes. Of equals the sparser one stays.
    """
    best, steps = -math.inf, []
    for active, val, test in sorted(found, key=lambda s: (s[0], -s[1])):
        if val > best:
            best = val
            steps.append((active, test))
    return steps


def mean_staircase(cases: Sequence[Sequence[Stair]]) -> list[Stair]:
    """The mean over seeds, from the sparsity on at which each of them has a solution."""
    if not cases or not all(cases):
        return []
    start = max(case[0][0] for case in cases)
    levels = sorted({active for case in cases for active, _ in case if active >= start})
    return [(s, statistics.fmean([t for active, t in case if active <= s][-1] for case in cases)) for s in levels]


def stairs(axes: Axes, shown: Shown) -> None:
    """Test accuracy against the share of active units: a staircase for each method, single solutions as faint dots."""
    from matplotlib.ticker import StrMethodFormatter

    found = {method: solutions(runs) for method, runs in shown.items()}
    accuracies = [test for cuts in found.values() for _, _, test in cuts]
    top = max(accuracies, default=100.0)
    bottom = top - DEEP
    seen = [test for test in accuracies if test >= bottom]
    for method, runs in shown.items():
        dots = [(active, test) for active, _, test in found[method]]
        look: dict[str, Any] = {"marker": MARKERS[method], "color": COLOURS[method], "linewidths": 0}
        axes.scatter([a for a, _ in dots], [t for _, t in dots], s=14, alpha=0.25, **look)
        _steps(axes, complete(runs), COLOURS[method], MARKERS[method])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="active units (%, log scale)", ylabel="test accuracy (%)")
    axes.set_ylim(min(seen, default=bottom) - 0.3, top + 0.3)
    sparsest = min((active for cuts in found.values() for active, _, _ in cuts), default=10.0)
    axes.set_xlim(min(0.8 * sparsest, 9), 105)  # a decade at least, for its ends are what is labelled
    if len(seen) < len(accuracies):
        axes.set_title(
            f"not in view: {len(accuracies) - len(seen)} of {len(accuracies)} solutions, below {bottom:.1f} %"
        )


def _steps(axes: Axes, runs: Sequence[Record], colour: str, marker: str) -> None:
    """Thin staircases for several seeds, and a thick one for their mean, with a mark where each stair begins."""
    cases = [staircase(solutions([r for r in runs if r.seed == seed])) for seed in sorted({r.seed for r in runs})]
    for case in cases if len(cases) > 1 else []:
        axes.plot(*_to_the_end(case), drawstyle="steps-post", color=colour, linewidth=0.7, alpha=0.35)
    mean = mean_staircase(cases)
    look: dict[str, Any] = {"marker": marker, "markersize": 4, "markevery": slice(0, len(mean))}
    axes.plot(*_to_the_end(mean), drawstyle="steps-post", color=colour, linewidth=1.8, **look)


def _to_the_end(case: Sequence[Stair]) -> tuple[list[float], list[float]]:
    """A denser network is allowed to be any of the sparser ones, so the last stair goes on to 100 %."""
    whole = [*case, (100.0, case[-1][1])] if case else []
    return [s for s, _ in whole], [t for _, t in whole]
