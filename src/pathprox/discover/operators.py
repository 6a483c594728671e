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


@rule("view _unsafe_view reshape flatten unflatten permute transpose t movedim squeeze unsqueeze expand")
@rule("slice select narrow cat stack hstack vstack chunk split split_with_sizes unbind flip roll repeat tile")
@rule("repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle")
def layout(op: Op, *args: Value, **kwargs: Value) -> Value:
    """Layout operators are simply run on the labels."""
    if any(isinstance(leaf, Parameter) for leaf in tree_leaves((args, kwargs))):
        op.stop(args, f"{op.name} joins the unit with a parameter or constant")
        return op.nothing()
    target: Any = op.node.target
    if op.name in (
        "view",
        "_unsafe_view",
    ):  # labels are broadcast where activations are dense, so a view may need a copy
        target = torch.reshape
    out = target(*args, **kwargs)
    return tuple(out) if isinstance(out, list) else out


@rule("pad constant_pad_nd")
def pad(op: Op, x: Tensor, padding: list[int], mode: Value = "constant", value: Value = None) -> Value:
    if op.name == "constant_pad_nd":
        mode, value = "constant", mode
    if mode == "constant" and value not in (None, 0, 0.0, "constant"):
        op.stop(x, f"padding with {value} is not homogeneous")
        return op.nothing()
    if mode != "constant":  # reflection and the like exist for floating point alone; labels are far below 2^53
        return torch.nn.functional.pad(x.double(), padding, mode).long()
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
    if isinstance(dims, Tensor) or not isinstance(x, Tensor):  # max(x, y), entry by entry
        return add(op, x, dims)
    dims = kwargs.get("dim", dims)
    dims = [dims] if isinstance(dims, int) else dims or list(range(x.dim()))
    return op.first(op.reduce(x, dims, "reduces over several units").reshape(op.shape))


@rule("add sub maximum minimum")
def add(op: Op, x: Value, y: Value, **_: Value) -> Value:
    """A sum of two units is one unit; a parameter beside a unit is its bias."""
    if isinstance(x, Parameter):
        x, y = y, x
    if isinstance(x, Tensor) and isinstance(y, Parameter) and op.name == "add" and y.trained and y.covers(x.shape):
        op.beside("bias", x, y)
        return x
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return op.book.unify(x, y, f"{op.name} joins the unit with something that is not one", op.where).expand(
            op.shape
        )
    op.stop([x, y], f"{op.name} of a constant is not homogeneous")
    return op.nothing()


@rule("mul div")
def multiply(op: Op, x: Value, y: Value, **_: Value) -> Value:
    """What does not scale with a unit (a number, a constant, an activation that is no unit) lets it pass."""
    if not isinstance(x, Tensor) and op.name == "mul":
        x, y = y, x
    if not isinstance(x, Tensor):
        op.stop(y, "a constant divided by the unit is not homogeneous")
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


@rule("prelu _prelu_kernel")
def prelu(op: Op, x: Tensor, slope: Value) -> Value:
    """Homogeneous for every slope; slopes of single channels go away with them."""
    if not isinstance(slope, Parameter):
        op.stop(x, "prelu with a computed slope")
        return op.nothing()
    if slope.numel > 1:
        op.claim("carried", slope, op.channels(x, 1 if x.dim() > 1 else 0), (slope.numel,), (0,))
    op.understood.add(slope.name)
    return x


# Layers: they take units in, as columns of their weight, and start new ones, as its rows.
@rule("linear")
def linear(op: Op, x: Tensor, weight: Value, bias: Value = None) -> Value:
    return affine(op, x, weight, bias, channel=-1, shape=tuple(weight.shape), rows=(0,), columns=(1,))


@rule("conv1d conv2d conv3d")
def convolution(op: Op, x: Tensor, weight: Value, bias: Value = None, *args: Value, **kwargs: Value) -> Value:
    return _convolution(op, x, weight, bias, _groups(args, kwargs), False)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed_convolution(
    op: Op, x: Tensor, weight: Value, bias: Value = None, *args: Value, **kwargs: Value
) -> Value:
    return _convolution(op, x, weight, bias, _groups(args, kwargs), True)


def _groups(args: tuple[Value, ...], kwargs: dict[str, Value]) -> int:
    """Both kinds of convolution have it as the fourth argument after the bias."""
    return int(args[3]) if len(args) > 3 else int(kwargs.get("groups", 1))


def _convolution(op: Op, x: Tensor, weight: Value, bias: Value, groups: int, transposed: bool) -> Value:
    shape = tuple(weight.shape)
    channel = 1 - len(shape)  # of (batch, channel, *kernel), the batch left out by some
    rows: tuple[int, ...] = (1,) if transposed else (0,)
    columns: tuple[int, ...] = (0,) if transposed else (1,)
    if groups > 1:  # seen as (group, ...): a group's rows meet that group's columns alone
        shape = (groups, shape[0] // groups, *shape[1:])
        rows, columns = ((0, 2), (0, 1)) if transposed else ((0, 1), (0, 2))
    return affine(op, x, weight, bias, channel, shape, rows, columns)


def affine(
    op: Op,
    x: Tensor,
    weight: Value,
    bias: Value,
    channel: int,
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    columns: tuple[int, ...],
) -> Value:
    seen = op.channels(x, channel)
    labels = op.book.start(op.owner(weight), op.shape[channel])
    if not (isinstance(weight, Parameter) and weight.trained and (bias is None or isinstance(bias, Parameter))):
        reason = f"the weight of {op.name} is computed in the forward pass or not trained"
        op.stop([seen, labels], reason)
        return op.nothing()
    op.claim("out", weight, seen, shape, columns)
    op.claim("into", weight, labels, shape, rows)
    if bias is not None:
        op.claim("bias", bias, labels, bias.shape, (0,))
    return op.spread(labels, channel)


@rule(
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit native_batch_norm _batch_norm_no_update"
)
def batch_norm(op: Op, x: Tensor, weight: Value, bias: Value, *stats: Value, **_: Value) -> Value:
    """The unit restarts at the norm's scale and bias; what feeds the norm is carried with it."""
    before = op.channels(x, 1)
    labels = op.book.start(op.owner(weight), op.shape[1])
    if not (isinstance(weight, Parameter) and isinstance(bias, Parameter) and weight.trained):
        op.stop([before, labels], "batch norm without scale and bias has nothing to rescale")
        return op.nothing()
    op.book.end(before, f"batch norm {op.owner(weight)} starts the unit anew", op.where, heirs=labels)
    op.claim("into", weight, labels, weight.shape, (0,))
    op.claim("bias", bias, labels, bias.shape, (0,))
    for buffer in stats[:2]:
        if isinstance(buffer, Parameter):
            op.claim("carried", buffer, labels, buffer.shape, (0,))
    return op.first(op.spread(labels, 1))


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
rule("instance_norm")(ends("{} takes the unit's scale away"))
rule("gelu silu sigmoid tanh elu selu celu mish softplus hardtanh hardswish hardsigmoid")(ends("{} is not homogeneous"))
rule("softmax _softmax log_softmax clamp reciprocal pow sqrt rsqrt exp log sin cos")(ends("{} is not homogeneous"))
rule("matmul bmm mm baddbmm einsum scaled_dot_product_attention")(ends("{} multiplies the unit with other activations"))
