"""What each operator does to labels: one line in a table for most, a few lines for those that own parameters.

An operator that is not here ends the units that reach it, and its name is the reason. So a missing line costs units,
never truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pathprox.discover.labels import NONE, ZERO, Parameter
from pathprox.discover.op import Op, Value

Rule = Callable[..., Value]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Enter a function in the table, under one or more names of operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@rule("relu leaky_relu abs neg clone contiguous alias detach dropout _to_copy to lift_fresh_copy")
def entrywise(op: Op, x: Tensor, *_: Value, **__: Value) -> Value:
    """Homogeneous, entry by entry."""
    if not op.floating:
        op.stop(x, "conversion to whole numbers is not homogeneous")
        return op.nothing()
    return x


@rule("clamp clamp_min threshold masked_fill")
def zero_below(op: Op, x: Tensor, *args: Value, **kwargs: Value) -> Value:
    """ReLU under other names, and zeros written by a mask: homogeneous if all numbers involved are zero."""
    numbers = [a for a in [*args, *kwargs.values()] if a is not None and not isinstance(a, Tensor | Parameter)]
    if any(numbers) or not numbers:
        op.stop(x, f"{op.name} at {', '.join(map(str, numbers)) or 'a computed bound'} is not homogeneous")
        return op.nothing()
    return x


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
    if any(isinstance(leaf, Parameter) for leaf in tree_leaves((args, kwargs))):
        op.stop(args, f"{op.name} joins the unit with a parameter or constant")
        return op.nothing()
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


@rule("mean sum amax amin max min")
def reduction(op: Op, x: Tensor, dims: Value = None, *_: Value, **kwargs: Value) -> Value:
    if isinstance(dims, Tensor | Parameter):  # max(x, y), entry by entry
        return add(op, x, dims)
    dims = kwargs.get("dim", dims)
    dims = [dims] if isinstance(dims, int) else dims or list(range(x.dim()))
    return op.first(op.reduce(x, dims, "reduces over several units").reshape(op.shape))


@rule("add sub maximum minimum")
def add(op: Op, x: Value, y: Value, **_: Value) -> Value:
    """A sum of two units is one unit; a parameter beside a unit is its bias."""
    if not isinstance(x, Tensor):
        x, y = y, x
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        reason = f"{op.name} joins the unit with something that is not one"
        return op.book.unify(x, y, reason, op.where).expand(op.shape)
    if isinstance(x, Tensor) and isinstance(y, int | float) and y == 0:
        return x
    is_bias = isinstance(y, Parameter) and y.trained and op.name in ("add", "sub")
    if isinstance(x, Tensor) and is_bias and y.covers(x.shape):
        op.beside("bias", x, y)
        return torch.where(x == ZERO, NONE, x)  # where there was nothing there is now the bias
    op.stop([x, y], f"{op.name} of a constant is not homogeneous")
    return op.nothing()


@rule("mul div")
def multiply(op: Op, x: Value, y: Value, rounding_mode: str | None = None, **_: Value) -> Value:
    """What does not scale with a unit (a number, a constant, an activation that is no unit) lets it pass."""
    if not isinstance(x, Tensor) and op.name == "mul":
        x, y = y, x
    if not isinstance(x, Tensor) or rounding_mode is not None:
        op.stop([x, y], f"this kind of {op.name} is not homogeneous")
        return op.nothing()
    if isinstance(y, Parameter):
        if y.trained and y.covers(x.shape):
            op.beside("carried", x, y)
        elif y.trained and y.numel > 1:
            op.stop(x, f"{op.name} by the parameter {y.name} is not understood")
            return op.nothing()
        op.understood.add(y.name)
        return x.expand(op.shape)
    if not isinstance(y, Tensor):
        return x
    x, y = x.expand(op.shape), y.expand(op.shape)
    both = (x > NONE) & (y > NONE)
    op.stop([x[both], y[both]], f"{op.name} of two units is not homogeneous in either")
    if op.name == "div":
        op.stop(y, "division by the unit is not homogeneous")
        return torch.where(y == NONE, x, NONE)
    either = torch.where(x == NONE, y, x)
    return torch.where((x == ZERO) | (y == ZERO), ZERO, torch.where(both, NONE, either))


@rule("getitem")
def getitem(op: Op, x: Value, index: int) -> Value:
    return x[index]


def ends(reason: str) -> Rule:
    """The unit ends here, for a better reason than that the operator is unknown."""

    def apply(op: Op, *args: Value, **kwargs: Value) -> Value:
        op.stop([*args, *kwargs.values()], reason.format(op.name))
        return op.nothing()

    return apply


rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")(ends("{} mixes all units of a layer"))
rule("group_norm native_group_norm")(ends("{} mixes the units of a group"))
rule("rrelu rrelu_with_noise")(ends("{} draws its slopes at random, so that nothing can be proved of it"))
rule("instance_norm")(ends("{} takes the unit's scale away"))
rule("gelu silu sigmoid tanh elu selu celu mish softplus hardtanh hardswish hardsigmoid")(ends("{} is not homogeneous"))
rule("softmax _softmax log_softmax reciprocal pow sqrt rsqrt exp log sin cos")(ends("{} is not homogeneous"))
rule("bmm baddbmm einsum scaled_dot_product_attention")(ends("{} multiplies the unit with other activations"))

BINARY = {"add", "sub", "mul", "div", "max", "min", "maximum", "minimum"}
"""Operators whose rules take a parameter or constant in the first place; elsewhere it stands for an activation."""
