"""Rules for products of activations: attention and its parts.

Attention is linear in the values, so rows of the value projection and columns of the output projection are units, one
for each dimension of each head. Queries and keys of a head gate all units of that head, and can go away only with all
of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathprox.discover.labels import MIXED, NONE, Parameter
from pathprox.discover.layers import matrix
from pathprox.discover.op import MIXES, Op, Value
from pathprox.discover.operators import rule


@rule("matmul mm bmm")
def matmul(op: Op, x: Tensor, y: Value) -> Value:
    """x @ W with W a parameter is a linear layer; otherwise each row of x meets each column of y."""
    if isinstance(y, Parameter):
        if y.trained and len(y.shape) == 2:
            return matrix(op, x, y, None)
        y = op.plain(y)
    rows = op.reduce(x if x.dim() > 1 else x[None], [-1], MIXES)
    columns = op.reduce(y if y.dim() > 1 else y[:, None], [-2], MIXES)
    return op.product(rows, columns, entrywise=False).reshape(op.shape)


@rule("addmm")
def addmm(op: Op, bias: Value, x: Tensor, weight: Value, **_: Value) -> Value:
    if isinstance(weight, Parameter):
        return matrix(op, x, weight, bias)
    op.stop([bias, x, weight], f"{op.name} multiplies the unit with other activations")
    return op.nothing()


@rule("baddbmm")
def baddbmm(op: Op, mask: Value, x: Tensor, y: Value, **_: Value) -> Value:
    return _masked(op, matmul(op, x, y), mask)


@rule("scaled_dot_product_attention")
def attention(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Value = None,
    *_: Value,
    attn_mask: Value = None,
    enable_gqa: bool = False,
    **__: Value,
) -> Value:
    """softmax(query key^T) value."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    queries = op.reduce(query, [-1, -2], MIXES)
    keys = op.reduce(key, [-1, -2], MIXES)
    scores = _masked(op, op.product(queries, keys, entrywise=False), attn_mask if mask is None else mask)
    scores = op.curve(op.reduce(scores, [-1, -2], MIXES), how=MIXED)
    values = op.reduce(value, [-2], MIXES)
    return op.product(scores, values, entrywise=False).expand(op.shape)


def _masked(op: Op, scores: Tensor, mask: Value) -> Tensor:
    """Scores with something added to them: a mask, or another unit such as a head's position bias."""
    if not isinstance(mask, Tensor):
        return scores
    scores, mask = torch.broadcast_tensors(scores, mask)
    both = (mask > NONE) & (scores > NONE)
    if both.any():
        op.book.unify(scores[both], mask[both], MIXES, op.where)
    return torch.where(scores == NONE, mask, scores)


@rule("einsum")
def einsum(op: Op, equation: str, operands: list[Value], **__: Value) -> Value:
    """A product of two activations: what is summed becomes one unit, the rest meets entry by entry."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    plain = all(isinstance(o, Tensor) for o in operands) and output and "." not in equation
    if len(terms) != 2 or not plain or any(len(set(t)) < len(t) for t in terms):
        op.stop(operands, f"this kind of {op.name} is not understood")
        return op.nothing()
    x, y = (_aligned(op, x, term, output) for x, term in zip(operands, terms, strict=True))
    summed = any(letter not in output for term in terms for letter in term)
    return op.product(x, y, entrywise=not summed).expand(op.shape)


def _aligned(op: Op, x: Tensor, term: str, output: str) -> Tensor:
    """The operand with the summed dimensions gone and the others where the output has them."""
    summed = [d for d, letter in enumerate(term) if letter not in output]
    x = op.reduce(x, summed, MIXES) if summed else x
    x = x.squeeze(summed) if summed else x
    kept = [letter for letter in term if letter in output]
    order = sorted(range(len(kept)), key=lambda d: output.index(kept[d]))
    shape = [x.shape[kept.index(letter)] if letter in kept else 1 for letter in output]
    return x.permute(order).reshape(shape)


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def layer_norm(op: Op, x: Tensor, shape: list[int], *parameters: Value, **_: Value) -> Value:
    """The end of a layer's units; but a norm over each head by itself only makes one unit of the head."""
    labels = op.reduce(x, list(range(-len(shape), 0)), MIXES)
    roots = op.book.roots(labels).unique()
    if (roots > NONE).sum() < 2:
        op.stop(x, f"{op.name} mixes all units of a layer")
        return op.nothing()
    labels = op.curve(labels, how=MIXED).expand(x.shape)
    for parameter in parameters:
        if isinstance(parameter, Parameter) and parameter.trained:
            op.beside("carried", labels, parameter)
    return op.first(labels)
