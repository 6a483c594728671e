"""What each operator does to labels: one line in a table for most, a few lines for those that own parameters.

An operator that is not here ends the units that reach it, and its name is the reason. So a missing line costs units,
never truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pathprox.discover.labels import CURVED, MIXED, NONE, ZERO, Parameter, compact
from pathprox.discover.op import MIXES, Op, Value

Rule = Callable[..., Value]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Enter a function in the table, under one or more names of operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@rule("neg clone contiguous alias detach dropout _to_copy to lift_fresh_copy")
def linear_entrywise(op: Op, x: Tensor, *_: Value, **__: Value) -> Value:
    if not op.floating:
        op.stop(x, "conversion to whole numbers is not homogeneous")
        return op.nothing()
    return x


@rule("relu leaky_relu abs")
def entrywise(op: Op, x: Tensor, *_: Value, **__: Value) -> Value:
    """Homogeneous, entry by entry."""
    return op.bend(linear_entrywise(op, x))


@rule("gelu silu sigmoid tanh elu selu celu mish softplus log_sigmoid log_sigmoid_forward hardtanh hardswish")
@rule("hardsigmoid relu6 softsign erf reciprocal pow square sqrt rsqrt exp expm1 log log1p sin cos atan sinh cosh")
def curved(op: Op, x: Tensor, *others: Value, **__: Value) -> Value:
    """A function of each entry by itself that is not homogeneous: the unit can be removed, but not rescaled."""
    if not isinstance(x, Tensor) or any(isinstance(other, Tensor | Parameter) for other in others):
        op.stop([x, *others], f"this kind of {op.name} is not understood")
        return op.nothing()
    return op.first(op.curve(x))


@rule("clamp clamp_min clamp_max threshold masked_fill")
def zero_below(op: Op, x: Tensor, *args: Value, **kwargs: Value) -> Value:
    """ReLU under other names, and zeros written by a mask: homogeneous if all numbers involved are zero."""
    numbers = [a for a in [*args, *kwargs.values()] if a is not None and not isinstance(a, Tensor | Parameter)]
    if not numbers:
        op.stop(x, f"{op.name} at a computed bound is not homogeneous")
        return op.nothing()
    if any(numbers):
        return op.curve(x, f"{op.name} at {', '.join(map(str, numbers))} is not homogeneous")
    return op.bend(x)


@rule("zeros zeros_like new_zeros")
def zeros(op: Op, *_: Value, **__: Value) -> Value:
    return torch.tensor(ZERO).expand(op.shape)


@rule("ones ones_like new_ones full full_like new_full empty empty_like rand_like randn_like arange")
def shape_alone(op: Op, *_: Value, **__: Value) -> Value:
    """A tensor that takes no more than its shape from the unit."""
    return op.nothing()


@rule("view _unsafe_view reshape flatten unflatten permute transpose t movedim squeeze unsqueeze expand")
@rule("slice select narrow cat stack hstack vstack chunk split split_with_sizes unbind flip roll repeat tile")
@rule("slice_scatter select_scatter repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle")
def layout(op: Op, *args: Value, **kwargs: Value) -> Value:
    """Layout operators are simply run on the labels."""
    args, kwargs = tree_map(op.plain, (args, kwargs))
    if any(isinstance(leaf, torch.dtype) for leaf in args):
        op.stop(args, f"{op.name} as another type is not homogeneous")
        return op.nothing()
    # labels are broadcast where activations are dense, so a view may need a copy
    target: Any = torch.reshape if op.name in ("view", "_unsafe_view") else op.node.target
    out = target(*args, **kwargs)
    return tuple(out) if isinstance(out, list) else out


@rule("copy")
def copy(op: Op, x: Value, source: Value, *_: Value, **__: Value) -> Value:
    """What is written over ``x``."""
    return source.expand(op.shape) if isinstance(source, Tensor) else op.nothing()


@rule("pad constant_pad_nd")
def pad(op: Op, x: Tensor, padding: list[int], *how: Value, **kwargs: Value) -> Value:
    named = [v for v in [*how, *kwargs.values()] if isinstance(v, str) and v != "constant"]
    if named:  # reflection and the like exist for floating point alone; labels are far below 2^53
        return torch.nn.functional.pad(x.double(), padding, named[0]).long()
    numbers = [v for v in [*how, *kwargs.values()] if isinstance(v, int | float)]
    if any(numbers):
        op.stop(x, f"padding with {numbers[0]} is not homogeneous")
        return op.nothing()
    return torch.nn.functional.pad(x, padding, "constant", ZERO)


def window(spatial: int) -> Rule:
    """Each channel by itself, over the last one, two or three dimensions."""

    def apply(op: Op, x: Tensor, *_: Value, **__: Value) -> Value:
        labels = op.reduce(x, list(range(-spatial, 0)), "takes windows over several units").expand(op.shape)
        return op.first(labels)

    return apply


for _n in (1, 2, 3):
    rule(f"max_pool{_n}d max_pool{_n}d_with_indices adaptive_max_pool{_n}d")(window(_n))
    rule(f"avg_pool{_n}d adaptive_avg_pool{_n}d _adaptive_avg_pool{_n}d")(window(_n))
    rule(f"upsample_nearest{_n}d _upsample_nearest_exact{_n}d")(window(_n))
rule("upsample_linear1d")(window(1))
rule("upsample_bilinear2d upsample_bicubic2d")(window(2))
rule("upsample_trilinear3d")(window(3))


@rule("cumsum")
def running_sum(op: Op, x: Tensor, dim: int, **_: Value) -> Value:
    return op.reduce(x, [dim], "adds several units").expand(op.shape)


@rule("softmax _softmax log_softmax _log_softmax")
def softmax(op: Op, x: Tensor, dim: int, *_: Value, **__: Value) -> Value:
    """Entries along a dimension become one unit, no longer homogeneous."""
    return op.curve(op.reduce(x, [dim], MIXES), how=MIXED).expand(op.shape)


@rule("linalg_vector_norm")
def vector_norm(op: Op, x: Tensor, order: Value = 2, dims: Value = None, *_: Value, **__: Value) -> Value:
    return op.bend(reduction(op, x, dims))


@rule("mean sum amax amin max min logsumexp")
def reduction(op: Op, x: Tensor, dims: Value = None, *_: Value, **kwargs: Value) -> Value:
    if isinstance(dims, Tensor | Parameter):  # max(x, y), entry by entry
        return add(op, x, dims)
    dims = kwargs.get("dim", dims)
    dims = [dims] if isinstance(dims, int) else dims or list(range(x.dim()))
    labels = op.reduce(x, dims, "reduces over several units").reshape(op.shape)
    if op.name == "logsumexp":
        labels = op.curve(labels, how=MIXED)
    elif op.name not in ("mean", "sum"):
        op.bend(labels)
    return op.first(labels)


@rule("add sub subtract rsub maximum minimum")
def add(op: Op, x: Value, y: Value, **_: Value) -> Value:
    """A sum of two units is one unit; a parameter beside a unit is its bias."""
    if not isinstance(x, Tensor):
        x, y = y, x
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _join(op, x, y)
    if isinstance(x, Tensor) and isinstance(y, int | float):
        return op.curve(x, f"{op.name} of a constant is not homogeneous") if y else x
    is_bias = isinstance(y, Parameter) and y.free and op.name not in ("maximum", "minimum", "max", "min")
    if isinstance(x, Tensor) and is_bias and y.numel == 1:
        op.understood.add(y.name)
        return op.curve(x.expand(op.shape), f"{op.name} of one number to all units is not homogeneous")
    if isinstance(x, Tensor) and is_bias and y.covers(x.shape):
        op.beside("bias", x, y)
        return op.filled(x)
    if isinstance(x, Tensor) and isinstance(y, Parameter) and not y.trained:
        return _join(op, x, op.plain(y), f"{op.name} of a constant is not homogeneous")
    op.stop([x, y], f"{op.name} of a constant is not homogeneous")
    return op.nothing()


def _join(op: Op, x: Tensor, y: Tensor, reason: str | None = None) -> Tensor:
    """Entry by entry one unit. What is not homogeneous anyway may also meet something that is no unit, as a mask."""
    x, y = compact(x.expand(op.shape), y.expand(op.shape))
    free_x, free_y = op.book.bends(x) >= CURVED, op.book.bends(y) >= CURVED
    x, y = torch.where((x == NONE) & free_y, ZERO, x), torch.where((y == NONE) & free_x, ZERO, y)
    joined = op.book.unify(x, y, reason or f"{op.name} joins the unit with something that is not one", op.where)
    return joined.expand(op.shape)


@rule("where")
def where(op: Op, condition: Value, x: Value, y: Value) -> Value:
    """One or the other: like a sum, as far as units are concerned."""
    op.stop(condition)
    x, y = op.plain(x), op.plain(y)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _join(op, x, y)
    return op.curve(x if isinstance(x, Tensor) else y).expand(op.shape)


@rule("mul multiply div divide true_divide")
def multiply(op: Op, x: Value, y: Value, rounding_mode: str | None = None, **_: Value) -> Value:
    """What does not scale with a unit (a number, a constant, an activation that is no unit) lets it pass."""
    divides = op.name in ("div", "divide", "true_divide")
    if not isinstance(x, Tensor) and not divides:
        x, y = y, x
    if not isinstance(x, Tensor) or rounding_mode is not None:
        op.stop([x, y], f"this kind of {op.name} is not homogeneous")
        return op.nothing()
    if isinstance(y, Parameter):
        if (y.free or y.kind == "buffer") and y.covers(x.shape):
            op.beside("carried", x, y)
        elif y.trained and y.numel > 1:
            op.stop(x, f"{op.name} by the parameter {y.name} is not understood")
            return op.nothing()
        op.understood.add(y.name)
        return x.expand(op.shape)
    if not isinstance(y, Tensor):
        return x
    x, y = x.expand(op.shape), y.expand(op.shape)
    if divides:
        y = op.curve(y, "division by the unit is not homogeneous")
    return op.product(x, y, entrywise=True)


@rule("addcmul")
def addcmul(op: Op, x: Value, left: Value, right: Value, **_: Value) -> Value:
    """x + left * right."""
    return add(op, x, multiply(op, left, right))


@rule("glu")
def glu(op: Op, x: Tensor, dim: int = -1) -> Value:
    linear, gate = x.chunk(2, dim)
    return op.product(linear, op.curve(gate), entrywise=True)


@rule("index index_select gather")
def lookup(op: Op, x: Tensor, *where: Value, **kwargs: Value) -> Value:
    """Entries picked by number: all the same along the picked dimensions, or nothing can be said."""
    if op.name == "index":
        numbers: list[Value] = where[0]
        dims = [d for d, index in enumerate(numbers) if index is not None]
    else:
        dims, numbers = [where[0]], [where[1]]
    uniform = op.book.common(x, dims)
    if not torch.equal(uniform.expand(x.shape), x) or any(_is_mask(n) for n in op.node.all_input_nodes[1:]):
        op.stop(x, f"{op.name} picks among the units by number")
        return op.nothing()
    firsts = [None if n is None else torch.zeros(n.shape, dtype=torch.int64) for n in numbers]
    target: Any = op.node.target
    return target(x, firsts) if op.name == "index" else target(x, where[0], firsts[0])


def _is_mask(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


@rule("getitem")
def getitem(op: Op, x: Value, index: int) -> Value:
    return x[index]


def ends(reason: str) -> Rule:
    """The unit ends here, for a better reason than that the operator is unknown."""

    def apply(op: Op, *args: Value, **kwargs: Value) -> Value:
        op.stop([*args, *kwargs.values()], reason.format(op.name))
        return op.nothing()

    return apply


rule("group_norm native_group_norm")(ends("{} mixes the units of a group"))
rule("rrelu rrelu_with_noise")(ends("{} draws its slopes at random, so that nothing can be proved of it"))
rule("instance_norm")(ends("{} takes the unit's scale away"))

BINARY = {"add", "sub", "mul", "div", "max", "min", "maximum", "minimum", "where", "embedding"} | {
    "subtract",
    "multiply",
    "divide",
    "true_divide",
    "addmm",
    "baddbmm",
    "addcmul",
}
"""Operators whose rules take a parameter or constant in the first place; elsewhere it stands for an activation."""
