"""Rules for the operators that own parameters: layers take units in, as columns, and start new ones, as rows."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pathprox.discover.labels import Parameter
from pathprox.discover.op import Op, Value
from pathprox.discover.operators import rule


@rule("linear")
def linear(op: Op, x: Tensor, weight: Value, bias: Value = None) -> Value:
    if isinstance(weight, Parameter) and weight.transposed:
        return matrix(op, x, replace(weight, transposed=False), bias)  # the transpose of a transpose
    return affine(op, x, weight, bias, -1, tuple(weight.shape), rows=(0,), columns=(1,))


def matrix(op: Op, x: Tensor, weight: Parameter, bias: Value) -> Value:
    """x @ weight."""
    rows, columns = (0, 1) if weight.transposed else (1, 0)
    return affine(op, x, replace(weight, transposed=False), bias, -1, weight.shape, (rows,), (columns,))


@rule("embedding")
def embedding(op: Op, weight: Value, numbers: Value, *_: Value, **__: Value) -> Value:
    """The columns of a table are no units of their own (most rows have no gradient in a step), but go with others.

    So does the position bias of an attention head, which such a table often holds.
    """
    labels = op.book.start(op.owner(weight), op.shape[-1])
    if not _is_trained(weight):
        op.stop(labels, "the table of this embedding is computed in the forward pass or not trained")
        return op.nothing()
    op.claim("carried", weight, labels, weight.shape, (1,))
    return op.spread(labels, -1)


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
    """A layer whose weight, seen in ``shape``, has its outputs along ``rows`` and its inputs along ``columns``."""
    seen = op.channels(x, channel)
    if len(shape) < 2:
        op.stop(seen, f"{op.name} with a vector for a weight has a single output")
        return op.nothing()
    labels = op.book.start(op.owner(weight), op.shape[channel])
    if not _is_trained(weight):
        op.stop([seen, labels], f"the weight of this {op.name} is computed in the forward pass or not trained")
        return op.nothing()
    op.claim("out", weight, seen, shape, columns)
    op.claim("into", weight, labels, shape, rows)
    if _is_trained(bias) and bias.shape == labels.shape:
        op.claim("bias", bias, labels, bias.shape, (0,))
    elif bias is not None:
        op.stop(labels, f"the bias of this {op.name} is computed, not trained, or shared by its outputs")
    return op.spread(labels, channel)


@rule("batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit native_batch_norm")
def batch_norm(op: Op, x: Tensor, weight: Value, bias: Value, *stats: Value, **_: Value) -> Value:
    """The unit restarts at the norm's scale and bias; what feeds the norm is carried with it."""
    before = op.channels(x, 1)
    if weight is None and bias is None:
        return _bare_batch_norm(op, before, stats)
    labels = op.book.start(op.owner(weight), op.shape[1])
    if not (_is_trained(weight) and _is_trained(bias)):
        op.stop([before, labels], "the scale or bias of this batch norm is computed in the forward pass or not trained")
        return op.nothing()
    op.book.end(before, f"batch norm {op.owner(weight)} starts the unit anew", op.where, heirs=labels)
    op.claim("into", weight, labels, weight.shape, (0,))
    op.claim("bias", bias, labels, bias.shape, (0,))
    _carry(op, labels, stats)
    return op.first(op.spread(labels, 1))


def _bare_batch_norm(op: Op, labels: Tensor, stats: tuple[Value, ...]) -> Value:
    """Without a scale and bias of its own it takes the unit's scale away; the unit can still be removed."""
    _carry(op, labels, stats)
    return op.first(op.curve(op.spread(labels, 1), "batch norm without scale and bias takes the unit's scale away"))


def _carry(op: Op, labels: Tensor, stats: tuple[Value, ...]) -> None:
    for buffer in stats[:2]:
        if isinstance(buffer, Parameter) and buffer.kind == "buffer":
            op.claim("carried", buffer, labels, buffer.shape, (0,))


@rule("prelu _prelu_kernel")
def prelu(op: Op, x: Tensor, slope: Value) -> Value:
    """Homogeneous for every slope; slopes of single channels go away with them."""
    if not _is_trained(slope):
        op.stop(x, "the slope of this prelu is computed in the forward pass or not trained")
        return op.nothing()
    if slope.numel > 1:
        aligned = slope.numel, *[1] * (x.dim() - 2)
        op.beside("carried", x, Parameter(slope.name, aligned if x.dim() > 1 else slope.shape, slope.kind))
    op.understood.add(slope.name)
    return x


def _is_trained(value: Value) -> bool:
    return isinstance(value, Parameter) and value.free
