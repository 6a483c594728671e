"""Which records speak for a recipe of the paper: its own runs or, where there are none, those nearest to it.

Runs that differ in more than their seed are never put into one mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice

from pathprox.experiments.methods import METHODS
from pathprox.experiments.paper import TABLES
from pathprox.experiments.recipes import CHOSEN, GRIDS, RECIPES, SEEDS, TASKS, Recipe, recipe_of
from pathprox.experiments.record import DIVERGED, DONE, Record

HYPER = ("lr", "weight_decay")
"""What the paper searched a grid for."""
DECISIVE = ("model", "data", "batch", "momentum", "clip", "milestones", "look_every", "prune")
"""Fields besides those that change what comes out of a run; the others say what is measured."""
IMAGES = {"mnist-100": 1000, "mnist": 55000, "cifar10": 45000, "svhn": 67257}
"""The paper's training images; smaller sets in the same format can be loaded under the same names."""
WAYS = ("paper", "validation")


@cache  # a recipe checks its network, and pages about many records ask again and again
def named(name: str) -> Recipe:
    """A recipe of the paper, or a task of it with any other method.

    That has PathProx's hyperparameters or, if it is a variation of weight decay, weight decay's.
    """
    task, _, method = name.partition("/")
    if name in RECIPES or task not in TASKS or method not in METHODS:
        return recipe_of(name)
    base = "weight-decay" if method.startswith("weight-decay") else "pathprox"
    return recipe_of(f"{task}/{base}").changed(method=method)


@cache
def _lasting(name: str, steps: int) -> Recipe:
    return named(name).lasting(steps)


def of_paper(task: str) -> tuple[str, ...]:
    """The methods that the paper shows for a task, in its tables or in a figure."""
    tabled = dict.fromkeys(c.method for cells in TABLES.values() for c in cells if c.task == task)
    return tuple(tabled or CHOSEN[task])


def differences(record: Record, *, ignoring: Sequence[str] = HYPER) -> tuple[str, ...]:
    """In words, how a run differs from the paper's recipe of its name; nothing if it does not.

    A run of another length is compared with the paper's recipe at that length, so that milestones which moved along
    are not named again.
    """
    recipe, paper = record.recipe, named(record.recipe.name)
    scaled = _lasting(paper.name, recipe.steps)
    found = [f"{recipe.steps:,} of {paper.steps:,} steps"] if recipe.steps < paper.steps else []
    found += [f"{recipe.steps:,} steps in place of {paper.steps:,}"] if recipe.steps > paper.steps else []
    for name in (*HYPER, *DECISIVE):
        mine, theirs = getattr(recipe, name), getattr(scaled, name)
        if name not in ignoring and mine != theirs:
            kept = name == "milestones" and mine == paper.until(recipe.steps).milestones
            found.append("milestones kept" if kept else f"{name.replace('_', ' ')} {mine} in place of {theirs}")
    images = IMAGES.get(recipe.data)
    if images and record.data.get("train", images) != images:
        found.append(f"{record.data['train']:,} training images of {images:,}")
    return tuple(found)


def done(records: Sequence[Record], name: str) -> list[Record]:
    """The runs of a recipe that ended as they should."""
    return [r for r in records if r.recipe.name == name and r.outcome == DONE]


def nearest(records: Sequence[Record], *, ignoring: Sequence[str] = HYPER) -> list[Record]:
    """Of the runs of one recipe those that differ least from the paper, all of them in the same way.

    The same data count more than the same length: on other images the numbers mean something else. A run that was
    repeated only to measure more counts once.
    """
    kinds: dict[tuple[str, ...], dict[tuple[float, ...], Record]] = {}
    for record in sorted(records, key=lambda r: r.measured):
        kind = kinds.setdefault(differences(record, ignoring=ignoring), {})
        kind[record.seed, record.recipe.lr, record.recipe.weight_decay] = record

    def distance(kind: tuple[str, ...]) -> tuple[float, ...]:
        recipe = next(iter(kinds[kind].values())).recipe
        paper = named(recipe.name)
        return recipe.data != paper.data, abs(recipe.steps - paper.steps), len(kind), -len(kinds[kind])

    found = kinds[min(kinds, key=distance)] if kinds else {}
    return [found[cell] for cell in sorted(found)]


def at(records: Sequence[Record], lr: float, weight_decay: float) -> list[Record]:
    """Those with these hyperparameters."""
    return [r for r in records if (r.recipe.lr, r.recipe.weight_decay) == (lr, weight_decay)]


def select(records: Sequence[Record]) -> tuple[float, float]:
    """Learning rate and weight decay with the best validation accuracy among the runs with the lowest seed.

    The records are those of one task and method. Of equals the smaller learning rate wins, then the smaller weight
    decay. Test accuracies play no part.
    """
    ended = [r for r in records if r.outcome == DONE]
    if not ended:
        raise ValueError(f"none of the {len(records)} runs has ended as it should: there is nothing to choose from.")
    names = sorted({r.recipe.name for r in ended})
    if len(names) > 1:
        raise ValueError(f"runs of {', '.join(names)} cannot be chosen from together: give those of one of them.")
    first = min(r.seed for r in ended)
    best = min(
        (r for r in ended if r.seed == first),
        key=lambda r: (-r.final["best"]["val"], r.recipe.lr, r.recipe.weight_decay),
    )
    return best.recipe.lr, best.recipe.weight_decay


@dataclass(frozen=True)
class Choice:
    """The runs that stand for one cell of a table, one for each seed."""

    name: str
    lr: float | None
    weight_decay: float | None
    records: tuple[Record, ...] = ()
    differs: tuple[str, ...] = ()
    """From the paper's recipe; see `differences`."""
    notes: tuple[str, ...] = ()
    """What is missing or otherwise to be known."""


def choose(name: str, records: Sequence[Record], chosen: str = "paper") -> Choice:
    """The runs of a recipe with the paper's hyperparameters, or with those of the best validation accuracy."""
    if chosen not in WAYS:
        raise ValueError(f"chosen={chosen!r} is none of {', '.join(WAYS)}.")
    paper, ended = named(name), done(records, name)
    if chosen == "paper":
        choice = Choice(name, paper.lr, paper.weight_decay)
        found = nearest(at(ended, paper.lr, paper.weight_decay))
    elif ended:
        kind = nearest(ended)
        choice = Choice(name, *select(kind), notes=(_breadth(kind),))
        found = at(kind, *select(kind))
    else:
        choice, found = Choice(name, None, None), []
    choice = replace(choice, records=tuple(found), differs=differences(found[0]) if found else ())
    return replace(choice, notes=(*choice.notes, *_lacking(choice, records, chosen)))


def _breadth(records: Sequence[Record]) -> str:
    """Among how many hyperparameters the choice was made."""
    recipe, first = records[0].recipe, min(r.seed for r in records)
    cells = {(r.recipe.lr, r.recipe.weight_decay) for r in records if r.seed == first}
    paper = GRIDS.get(recipe.task)
    whole = f" of the paper's {len(paper.lr) * len(paper.weight_decay)}" if paper else ""
    return f"hyperparameters chosen by validation accuracy among {len(cells)}{whole} cells of the grid"


def _lacking(choice: Choice, records: Sequence[Record], chosen: str) -> list[str]:
    """What a reader has to know about these runs: too few, of another kind, failed, in other precision."""
    cure = command(choice.name, chosen)
    found, others, notes = choice.records, _others(choice, records), []
    if not found:
        notes.append(f"missing; run `{cure}`")
        other = len(done(records, choice.name))
        if other:
            notes.append(f"{_runs(other)} with other hyperparameters; --chosen validation looks at these")
    elif choice.differs:
        notes.append(f"† {', '.join(choice.differs)}; for the paper's run `{cure}`")
    if 0 < len(found) < len(SEEDS):
        spent = {r.seed for r in (*found, *others) if r.finished}  # again they would bring nothing new
        absent = islice((s for s in count() if s not in spent), len(SEEDS) - len(found))
        cure = train(choice.name, [*absent]) if chosen == "paper" else cure
        notes.append(f"n = {len(found)} of {len(SEEDS)} seeds" + ("" if choice.differs else f"; run `{cure}`"))
    if failed := sum(r.status == DIVERGED for r in others):
        notes.append(f"{_runs(failed)} diverged and left out")
    if stuck := sum(r.stuck for r in others):
        notes.append(f"{_runs(stuck)} learned nothing and left out")
    if open_ := sum(not r.finished for r in others):
        notes.append(f"{_runs(open_)} not finished and left out")
    precisions = Counter(r.precision for r in found if r.precision != "float32")
    return [*notes, *(f"{_runs(number)} computed in {precision}" for precision, number in sorted(precisions.items()))]


def _others(choice: Choice, records: Sequence[Record]) -> list[Record]:
    """The runs of the same kind that did not end as they should."""
    mine = [r for r in records if r.recipe.name == choice.name and r.outcome != DONE]
    if choice.lr is not None and choice.weight_decay is not None:
        mine = at(mine, choice.lr, choice.weight_decay)
    return [r for r in mine if not choice.records or differences(r) == choice.differs]


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def train(name: str, seeds: Sequence[int] = SEEDS) -> str:
    """The command for runs of a recipe."""
    return " ".join(["pathprox train", name, *(f"--seed {seed}" for seed in seeds)])


def sweep(name: str) -> str:
    """The command for the search through a recipe's grid."""
    task, method = name.split("/")
    return f"pathprox sweep {task} --method {method}"


def command(name: str, chosen: str) -> str:
    """What makes the records of a recipe, with the hyperparameters of the paper or those of a search."""
    return train(name) if chosen == "paper" else sweep(name)
