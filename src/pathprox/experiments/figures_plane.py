"""Figure 2: what a classifier of the plane decides, from the weights in its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathprox.experiments.figures_parts import BLACK, COLOURS, key
from pathprox.experiments.methods import METHODS
from pathprox.experiments.models import build
from pathprox.experiments.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 200
"""Points of the grid along each axis."""
BLUE, RED = COLOURS["weight-decay"], COLOURS["pathprox"]
"""Class 0 and class 1."""
PALE = ("#f0ab9d", "#ffffff", "#9fc3e6")
"""The background where class 0 is out of the question, open, and certain."""


def boundaries(figure: Figure, shown: Mapping[str, Sequence[Record]]) -> None:
    """Each method at its first snapshot, and PathProx at its last with the other's boundary over it."""
    runs = {method: min(found, key=lambda r: r.seed) for method, found in shown.items()}
    final = "pathprox" if "pathprox" in runs else next(iter(runs))
    panels = [(method, _steps(run)[0]) for method, run in runs.items()] + [(final, _steps(runs[final])[-1])]
    grid = _grid([run.final["points"]["x"] for run in runs.values()])
    width, height = np.ptp(grid.reshape(-1, 2), axis=0)
    wide = figure.get_figwidth()
    figure.set_figheight(1.2 + wide / len(panels) * height / width)  # the panels leave no empty bands
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for ax, (method, step) in zip(axes, panels, strict=True):
        _panel(ax, runs[method], step, grid)
        ax.set_title(f"{METHODS[method].title}, {step:,} steps")
    handles = [
        key("white", r"$p_0 = 0.5$", width=2),
        key(BLUE, r"$p_0 = 0.9$", width=2),
        key(RED, r"$p_0 = 0.1$", width=2),
        key(BLUE, "class 0", "", marker="o"),
        key(RED, "class 1", "", marker="s"),
    ]
    handles[0].set_path_effects(_outlined())
    for method, run in runs.items():
        if method != final:
            step = _steps(run)[-1]
            _lines(axes[-1], grid, probability(run, step, grid), {0.5: BLACK}, linestyles="dashed", linewidths=1.4)
            handles.append(key(BLACK, f"{METHODS[method].title}, {step:,} steps", "--"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def probability(record: Record, step: int, grid: NDArray[Any]) -> NDArray[Any]:
    """The probability of class 0 at each point of a grid (rows, columns, 2)."""
    model = build(record.recipe.model)
    weights = record.final["weights"][str(step)]
    model.load_state_dict({name: torch.tensor(numbers) for name, numbers in weights.items()})
    with torch.no_grad():
        logits = model(torch.from_numpy(grid.reshape(-1, 2)).float())
    return logits.softmax(1)[:, 0].reshape(grid.shape[:2]).numpy()


def _steps(record: Record) -> list[int]:
    return sorted(int(step) for step in record.final["weights"])


def _grid(places: Sequence[Any]) -> NDArray[Any]:
    """A grid over all points, with a margin; (rows, columns, 2)."""
    points = np.concatenate([np.reshape(p, (-1, 2)) for p in places])
    low, high = points.min(0), points.max(0)
    low, high = low - 0.12 * (high - low), high + 0.12 * (high - low)
    return np.stack(np.meshgrid(np.linspace(low[0], high[0], SIDE), np.linspace(low[1], high[1], SIDE)), -1)


def _panel(axes: Axes, record: Record, step: int, grid: NDArray[Any]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("p0", PALE)
    p = probability(record, step, grid)
    edges = (grid[0, 0, 0], grid[-1, -1, 0], grid[0, 0, 1], grid[-1, -1, 1])
    axes.imshow(p, extent=edges, origin="lower", cmap=shades, vmin=0, vmax=1, aspect="equal")
    _lines(axes, grid, p, {0.1: RED, 0.9: BLUE}, linewidths=1.2)
    _lines(axes, grid, p, {0.5: "white"}, linewidths=1.8, path_effects=True)
    points, classes = np.reshape(record.final["points"]["x"], (-1, 2)), np.asarray(record.final["points"]["y"])
    for label, colour, marker in ((0, BLUE, "o"), (1, RED, "s")):
        mine = points[classes == label]
        axes.scatter(mine[:, 0], mine[:, 1], s=13, marker=marker, color=colour, edgecolors="white", linewidths=0.5)
    axes.grid(False)


def _lines(
    axes: Axes,
    grid: NDArray[Any],
    p: NDArray[Any],
    levels: Mapping[float, str],
    path_effects: bool = False,
    **look: Any,
) -> None:
    """Contours, as far as the network comes to such values anywhere."""
    reached = {level: colour for level, colour in levels.items() if p.min() < level < p.max()}
    if not reached:
        return
    drawn = axes.contour(grid[..., 0], grid[..., 1], p, levels=list(reached), colors=list(reached.values()), **look)
    if path_effects:
        drawn.set(path_effects=_outlined())


def _outlined() -> list[Any]:
    """A white line on what is nearly white needs an edge."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=3.2, foreground=BLACK), Normal()]
