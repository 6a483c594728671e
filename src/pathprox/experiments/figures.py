"""The paper's figures, drawn from the records of runs and from nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathprox.experiments.choice import HYPER, differences, done, nearest, sweep, train
from pathprox.experiments.figures_parts import (
    BLACK,
    COLOURS,
    GREY,
    MARKERS,
    active_units,
    best_lr,
    complete,
    key,
    lipschitz,
    objective,
    stairs,
)
from pathprox.experiments.figures_plane import boundaries
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import CHOSEN, grid
from pathprox.experiments.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shown = Mapping[str, Sequence[Record]]
"""The records of each method that has any."""

LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Kind:
    """What a figure of the paper is made of."""

    task: str
    title: str
    paint: Callable[[Figure, Shown], None]
    size: tuple[float, float]
    count: Callable[[Sequence[Record]], str]
    """In words, how many of a method's runs are shown."""
    searched: bool = False
    """Whether it takes the best of a grid."""

    def command(self, method: str) -> str:
        """What makes the records of a method."""
        return (sweep if self.searched else train)(f"{self.task}/{method}")


def draw(number: int, records: Sequence[Record], out: Path, endings: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write figure<number>.png and .pdf into ``out``, from whatever records there are for it."""
    kind, shown = kind_of(number), runs_of(number, records)
    if not shown:
        raise ValueError(f"there are no records for figure {number}. These commands make them:\n{commands(number)}")
    import matplotlib
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"figure{number}.{ending}" for ending in endings]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=kind.size, layout="constrained")
        kind.paint(figure, shown)
        figure.suptitle(_title(kind, shown), fontsize=10)
        for path in paths:
            # without a date, the same records give the same file
            figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths


def commands(number: int) -> str:
    """What to run for a figure, a line each."""
    return "\n".join(map(kind_of(number).command, CHOSEN[kind_of(number).task]))


def notes(number: int, records: Sequence[Record]) -> list[str]:
    """Which methods are missing, and which are drawn from runs that differ from the paper's."""
    kind, shown, found = kind_of(number), runs_of(number, records), []
    for method in CHOSEN[kind.task]:
        cure = f"run `{kind.command(method)}`"
        if method not in shown:
            found.append(f"{METHODS[method].title}: missing; {cure}.")
        elif differs := _differences(kind, shown[method]):
            found.append(f"{METHODS[method].title}: {', '.join(differs)}; for the paper's {cure}.")
    return found


def kind_of(number: int) -> Kind:
    if number not in FIGURES:
        raise ValueError(f"there is no figure {number}: choose one of {', '.join(map(str, FIGURES))}.")
    return FIGURES[number]


def runs_of(number: int, records: Sequence[Record]) -> Shown:
    """The runs that a figure is drawn from."""
    kind = kind_of(number)
    ignoring = HYPER if kind.searched else ()
    found = {m: nearest(done(records, f"{kind.task}/{m}"), ignoring=ignoring) for m in CHOSEN[kind.task]}
    return {method: runs for method, runs in found.items() if runs}


def _differences(kind: Kind, runs: Sequence[Record]) -> tuple[str, ...]:
    return differences(runs[0], ignoring=HYPER if kind.searched else ())


def _title(kind: Kind, shown: Shown) -> str:
    """What the figure shows, from how many runs, and how these differ from the paper's."""

    def told(runs: Sequence[Record]) -> str:
        return ", ".join([kind.count(runs), *_differences(kind, runs)])

    said = {METHODS[method].title: told(runs) for method, runs in shown.items()}
    same = len(set(said.values())) == 1
    parts = [next(iter(said.values()))] if same else [f"{title}: {what}" for title, what in said.items()]
    lines = [line for part in parts for line in textwrap.wrap(part, int(kind.size[0] * 13))]
    return "\n".join([kind.title, *lines])


def _figure1(figure: Figure, shown: Shown) -> None:
    parts: Any = figure.subfigures(1, 3, width_ratios=(1.1, 1, 1))
    left, middle, right = parts
    objective(left.subplots(), shown, loss=True)
    lipschitz(middle, shown)
    active_units(right.subplots(), shown)
    handles = [key(COLOURS[m], METHODS[m].title, width=3) for m in shown]
    handles += [key(BLACK, "F, balanced"), key(BLACK, "F as it is", "--"), key(GREY, "data loss")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _figure3(figure: Figure, shown: Shown) -> None:
    best = {method: best_lr(runs) for method, runs in shown.items()}
    axes = figure.subplots()
    objective(axes, best)
    axes.set(title="", ylabel="F")
    labels = {m: f"{METHODS[m].title}, lr {runs[0].recipe.lr:g}" for m, runs in best.items()}
    handles = [key(COLOURS[m], label, width=3) for m, label in labels.items()]
    handles += [key(BLACK, "F, balanced"), key(BLACK, "F as it is", "--")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _figure4(figure: Figure, shown: Shown) -> None:
    axes = figure.subplots()
    stairs(axes, shown)
    handles = [key(COLOURS[m], METHODS[m].title, marker=MARKERS[m]) for m in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _seeds(runs: Sequence[Record]) -> str:
    return f"n = {_counted(len({r.seed for r in runs}), 'seed')}"


def _seed_shown(runs: Sequence[Record]) -> str:
    return f"seed {min(r.seed for r in runs)} drawn, {_seeds(runs)}"


def _lr_shown(runs: Sequence[Record]) -> str:
    return f"{_seeds(best_lr(runs))}, {_counted(len({r.recipe.lr for r in runs}), 'learning rate')} tried"


def _cells_shown(runs: Sequence[Record]) -> str:
    count, whole = len({(r.recipe.lr, r.recipe.weight_decay) for r in runs}), len(grid(runs[0].recipe))
    return f"{_seeds(complete(runs))}, {count} of {whole} cells of the grid"


FIGURES: dict[int, Kind] = {
    1: Kind("figure1", "Weight decay and PathProx with the same λ", _figure1, (11, 5.2), _seeds),
    2: Kind("figure2", "Decision boundaries", boundaries, (11, 4), _seed_shown),
    3: Kind("figure3", "Minimising the weight-decay objective", _figure3, (6.5, 4.6), _lr_shown, searched=True),
    4: Kind("task5", "Test accuracy of cut networks", _figure4, (6.5, 4.6), _cells_shown, searched=True),
}
