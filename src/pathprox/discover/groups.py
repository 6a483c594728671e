"""From the book to groups of units, from groups to the couplings to penalise and the chains to balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pathprox.discover.labels import NONE, Book, Claim, End
from pathprox.slices import Slice
from pathprox.units import LeftOut, UnitGroup


def collect(book: Book) -> tuple[list[UnitGroup], list[LeftOut]]:
    """Units that met the same claims make a group; every other layer is left out with the reason its labels ended."""
    ends = book.ends()
    claims = [(c, book.roots(c.labels)) for c in book.claims]
    claims += _inherited(book, claims)
    alive = _alive(book, claims)
    signatures: dict[int, list[int]] = {}
    for number, (_, roots) in enumerate(claims):
        for root in roots.unique().tolist():
            if root in alive:
                signatures.setdefault(root, []).append(number)
    members: dict[tuple[int, ...], list[int]] = {}
    for root in sorted(alive):
        members.setdefault(tuple(signatures[root]), []).append(root)
    groups = [_group([claims[i] for i in numbers], roots) for numbers, roots in members.items()]
    groups.sort(key=lambda g: min(_position(claims, s.name) for s in g.into))

    left_out = []
    for layer in book.layers:
        roots = book.roots(layer.labels).unique().tolist()
        lost = [r for r in roots if r not in alive]
        if lost:
            end = ends.get(lost[0], [End("its output feeds no other layer", "")])[0]
            some = "" if len(lost) == len(roots) else f"{len(lost)} of {len(roots)} outputs: "
            left_out.append(LeftOut(layer.name, some + end.reason, end.where))
    return groups, list(dict.fromkeys(left_out))


def layer_rows(book: Book) -> list[Slice]:
    """The rows of every layer's weight, whether they are units or not."""
    into = (c for c in book.claims if c.kind == "into")
    return [Slice(c.parameter.name, c.shape, c.dims, torch.arange(len(c.labels)), len(c.labels)) for c in into]


Labelled = tuple[Claim, Tensor]


def _inherited(book: Book, claims: Sequence[Labelled]) -> list[Labelled]:
    """What feeds nothing but one batch norm is carried by the unit that starts there."""
    heirs = {}
    fed = {root for c, roots in claims if c.kind == "out" for root in roots.unique().tolist()}
    for root, ends in book.ends().items():
        names = {book.find(e.heir) if e.heir is not None else NONE for e in ends}
        if len(names) == 1 and NONE not in names and root not in fed:
            heirs[root] = names.pop()
    carried = []
    for claim, roots in claims:
        theirs = torch.tensor([heirs.get(r, NONE) for r in roots.tolist()])
        if (theirs != NONE).any():
            carried.append((replace(claim, kind="carried"), theirs))
    return carried


def _alive(book: Book, claims: Sequence[Labelled]) -> set[int]:
    """Labels that did not end, are fed by a weight and feed one."""
    kinds: dict[str, set[int]] = {"into": set(), "out": set()}
    for claim, roots in claims:
        kinds.setdefault(claim.kind, set()).update(r for r in roots.unique().tolist() if r > NONE)
    return (kinds["into"] & kinds["out"]) - set(book.ends())


def _group(claims: Sequence[Labelled], members: Sequence[int]) -> UnitGroup:
    kinds: dict[str, list[Slice]] = {"into": [], "bias": [], "out": [], "carried": []}
    number = {root: i for i, root in enumerate(members)}
    for claim, roots in claims:
        owner = torch.tensor([number.get(r, -1) for r in roots.tolist()])
        kinds[claim.kind].append(Slice(claim.parameter.name, claim.shape, claim.dims, owner, len(members)))
    return UnitGroup(**{kind: tuple(slices) for kind, slices in kinds.items()})


def _position(claims: Sequence[Labelled], name: str) -> int:
    return next(i for i, (c, _) in enumerate(claims) if c.parameter.name == name and c.kind == "into")


def choose_couplings(groups: Sequence[UnitGroup]) -> list[int]:
    """As many groups as can be had without sharing a weight.

    The group with the fewest rivals goes first, the earlier one on a tie: optimal where the sharing forms chains or
    trees, and on a plain chain of layers it gives the paper's pairs (1, 2), (3, 4), ...
    """
    holders: dict[str, list[int]] = {}
    for i, g in enumerate(groups):
        for s in g.weights:
            holders.setdefault(s.name, []).append(i)
    rivals: dict[int, set[int]] = {i: set() for i, g in enumerate(groups) if not g.meets_itself}
    for i, j in {(i, j) for them in holders.values() for i in them for j in them if i < j and {i, j} <= rivals.keys()}:
        if any(_overlap(a, b) for a in groups[i].weights for b in groups[j].weights):
            rivals[i].add(j)
            rivals[j].add(i)
    chosen = []
    while rivals:
        best = min(rivals, key=lambda i: (len(rivals[i]), i))
        chosen.append(best)
        gone = rivals[best] | {best}
        rivals = {i: others - gone for i, others in rivals.items() if i not in gone}
    return sorted(chosen)


def _overlap(a: Slice, b: Slice) -> bool:
    """Whether two slices share an entry: rows and columns always do, columns among each other may."""
    if a.name != b.name:
        return False
    return a.dims != b.dims or bool(((a.owner >= 0) & (b.owner >= 0)).any())


def find_chains(groups: Sequence[UnitGroup], couplings: Sequence[int]) -> list[list[int]]:
    """Runs of groups in which each feeds the next, cut to begin and end with a coupling.

    Groups i and j follow each other when the weights that i feeds are just the weights that feed j, all of them. Then
    a number taken out of i's ``out`` can be put into j's ``out``, and only the biases between notice: i and j can be
    balanced against each other.
    """

    def whole(slices: tuple[Slice, ...]) -> frozenset[str] | None:
        return frozenset(s.name for s in slices) if all(s.whole for s in slices) else None

    starts = {whole(g.into): j for j, g in enumerate(groups) if whole(g.into)}
    follows = {i: starts[key] for i, g in enumerate(groups) if (key := whole(g.out)) in starts}
    chains, coupled = [], set(couplings)
    for first in sorted(coupled - _reachable(coupled, follows)):
        run, here = [first], first
        while here in follows and follows[here] not in run:
            here = follows[here]
            run.append(here)
        while run[-1] not in coupled:
            run.pop()
        if len(run) > 1:
            chains.append(run)
    return chains


def _reachable(coupled: set[int], follows: dict[int, int]) -> set[int]:
    """Groups that come after a coupling."""
    behind: set[int] = set()
    for i in coupled:
        while i in follows and follows[i] not in behind:
            i = follows[i]
            behind.add(i)
    return behind
