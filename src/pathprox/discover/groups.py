"""From the book to groups of units, from groups to the couplings to penalise and the chains to balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pathprox.discover.labels import NONE, Book, Claim, End
from pathprox.slices import Slice
from pathprox.units import LeftOut, UnitGroup


@dataclass(frozen=True)
class Found:
    """What the book says, before any proof."""

    groups: list[UnitGroup]
    bundles: list[UnitGroup]
    """Units that can only go away together, taken as one: the dimensions of an attention head."""
    left_out: list[LeftOut]


def collect(book: Book, homogeneous_only: bool = True) -> Found:
    """Units that met the same claims make a group; every other layer is left out with the reason its labels ended."""
    ends, curved = book.ends(), book.curved()
    claims = [(c, book.roots(c.labels)) for c in book.claims]
    alive = _alive(claims) - set(ends)
    heirs = _heirs(book, ends, claims, alive)
    claims += _carried(claims, {root: next(iter(them)) for root, them in heirs.items() if len(them) == 1})
    groups = _form(claims, alive, set(curved))
    kept = [(g, roots) for g, roots in groups if g.homogeneous or (not homogeneous_only and len(g) > 1)]
    bundles = [
        g for g in _bundles(claims, heirs, set(curved)) if len(g) > 1 and (g.homogeneous or not homogeneous_only)
    ]
    alive = {root for _, roots in kept for root in roots}
    return Found([g for g, _ in kept], bundles, _left_out(book, alive, _with(claims, "into"), ends, curved))


def _left_out(
    book: Book, kept: set[int], fed: set[int], ends: dict[int, list[End]], curved: dict[int, End]
) -> list[LeftOut]:
    found = []
    for layer in book.layers:
        roots = book.roots(layer.labels).tolist()
        lost = [r for r in roots if r not in kept]
        if lost:
            nowhere = End("its output feeds no other layer" if lost[0] in fed else "an embedding has no w", "")
            end = ends.get(lost[0], [curved.get(lost[0], nowhere)])[0]
            some = "" if len(lost) == len(roots) else f"{len(lost)} of {len(roots)} outputs: "
            found.append(LeftOut(layer.name, some + end.reason, end.where))
    found += [LeftOut(name, reason) for name, reason in book.strangers.items()]
    return list(dict.fromkeys(found))


def layer_rows(book: Book) -> list[Slice]:
    """The rows of every layer's weight, whether they are units or not."""
    into = (c for c in book.claims if c.kind == "into")
    return [Slice(c.parameter.name, c.shape, c.dims, torch.arange(len(c.labels)), len(c.labels)) for c in into]


Labelled = tuple[Claim, Tensor]


def _alive(claims: Sequence[Labelled]) -> set[int]:
    """Labels that are fed by a weight and feed one."""
    return _with(claims, "into") & _with(claims, "out")


def _with(claims: Sequence[Labelled], kind: str) -> set[int]:
    return {r for claim, roots in claims if claim.kind == kind for r in roots.unique().tolist() if r > NONE}


def _heirs(
    book: Book, ended: dict[int, list[End]], claims: Sequence[Labelled], alive: set[int]
) -> dict[int, frozenset[int]]:
    """Labels that feed nothing but a batch norm or units they gate, and the units they go away with."""
    fed = _with(claims, "out")
    direct: dict[int, set[int]] = {}
    for root, ends in ended.items():
        if root not in fed and all(e.heir is not None for e in ends):
            direct[root] = {book.find(e.heir) for e in ends if e.heir is not None}

    def final(root: int, seen: frozenset[int]) -> set[int]:
        if root not in direct:
            return {root}
        return {x for heir in direct[root] if heir not in seen for x in final(heir, seen | {root})}

    found = {root: frozenset(final(root, frozenset())) for root in direct}
    return {root: them for root, them in found.items() if them and them <= alive}


def _carried(claims: Sequence[Labelled], heirs: dict[int, int]) -> list[Labelled]:
    """What belongs to these labels, as carried by others."""
    found = []
    for claim, roots in claims:
        theirs = torch.tensor([heirs.get(r, NONE) for r in roots.tolist()])
        if (theirs != NONE).any():
            found.append((replace(claim, kind="carried"), theirs))
    return found


def _form(claims: Sequence[Labelled], members: set[int], curved: set[int]) -> list[tuple[UnitGroup, list[int]]]:
    """Groups of those members that share their claims, in the order of their first weights."""
    signatures: dict[int, list[int]] = {}
    for number, (_, roots) in enumerate(claims):
        for root in roots.unique().tolist():
            if root in members:
                signatures.setdefault(root, []).append(number)
    alike: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for root in sorted(members):
        alike.setdefault((root in curved, tuple(signatures[root])), []).append(root)
    groups = [
        (_group([claims[i] for i in numbers], roots, not bent), roots) for (bent, numbers), roots in alike.items()
    ]
    return sorted(groups, key=lambda g: min(_position(claims, s.name) for s in g[0].into))


def _bundles(claims: Sequence[Labelled], heirs: dict[int, frozenset[int]], curved: set[int]) -> list[UnitGroup]:
    """Units that are gated by one label can lose that gate only together."""
    lead: dict[int, int] = {}

    def find(root: int) -> int:
        while lead.setdefault(root, root) != root:
            root = lead[root]
        return root

    shared = {root: them for root, them in heirs.items() if len(them) > 1}
    for them in shared.values():
        first, *others = sorted(them)
        for other in others:
            lead[find(other)] = find(first)
    bundle = {root: find(root) for root in lead}
    inside = [(c, torch.tensor([bundle.get(r, NONE) for r in roots.tolist()])) for c, roots in claims]
    inside += _carried(claims, {root: bundle[next(iter(them))] for root, them in shared.items()})
    groups = _form(inside, set(bundle.values()), {bundle[root] for root in curved if root in bundle})
    return [g for g, _ in groups]


def _group(claims: Sequence[Labelled], members: Sequence[int], homogeneous: bool) -> UnitGroup:
    kinds: dict[str, list[Slice]] = {"into": [], "bias": [], "out": [], "carried": []}
    number = {root: i for i, root in enumerate(members)}
    for claim, roots in claims:
        owner = torch.tensor([number.get(r, -1) for r in roots.tolist()])
        kinds[claim.kind].append(Slice(claim.parameter.name, claim.shape, claim.dims, owner, len(members)))
    return UnitGroup(**{kind: tuple(slices) for kind, slices in kinds.items()}, homogeneous=homogeneous)


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

    sound = [i for i, g in enumerate(groups) if g.homogeneous]
    starts = {whole(groups[j].into): j for j in sound if whole(groups[j].into)}
    follows = {i: starts[key] for i in sound if (key := whole(groups[i].out)) in starts}
    chains, coupled = [], {i for i in couplings if groups[i].homogeneous}
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
