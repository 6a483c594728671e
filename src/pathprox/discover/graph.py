"""From a model to a book of labels: trace it once, then send labels through the graph."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pathprox.copies import Inputs
from pathprox.discover import attention as _attention  # noqa: F401  (its rules, and those of layers, enter the table)
from pathprox.discover.labels import Book, Parameter
from pathprox.discover.op import Op, Value, none_like
from pathprox.discover.operators import BINARY, RULES


def trace(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """A functional graph of high-level operators (in-place ones rewritten, layers kept whole)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals while tracing
        try:
            program = torch.export.export(model, inputs[0], inputs[1], strict=False)
            return program.run_decompositions({})
        except Exception as error:
            cure = (
                "find_units needs a forward pass without branches that depend on data. Make the branch static, or "
                "call find_units on the part of the model that can be traced."
            )
            if "pytree" in str(error):
                cure = "Tell torch of the class of its inputs or outputs: torch.export.register_dataclass(YourClass)."
            problem = (
                f"torch.export cannot trace {type(model).__name__} with these example inputs: {_first_line(error)}"
            )
            raise ValueError(f"{problem}\n{cure}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass
class Usage:
    """How the graph uses each trained parameter."""

    understood: dict[str, list[str]] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    matrices: set[str] = field(default_factory=set)

    def spoil(self, book: Book) -> None:
        """A parameter used twice, or in a way no rule accounts for, cannot be rescaled at one place alone."""
        for name, operators in self.understood.items():
            if len(operators) > 1:
                _end_claims(book, name, f"{name} is used {len(operators)} times, at {' and '.join(operators)}")
        known = {layer.name for layer in book.layers}
        for name, operator in self.other.items():
            layer = name.rpartition(".")[0] or name
            if layer not in known and name in self.matrices:
                book.strangers.setdefault(layer, f"its parameters are used by {operator}")
        for name, operator in self.other.items():
            _end_claims(book, name, f"{name} is also used by {operator}")


def _end_claims(book: Book, name: str, reason: str) -> None:
    for claim in book.claims:
        if claim.parameter.name == name:
            book.end(claim.labels, reason, "")


def follow(program: torch.export.ExportedProgram, model: nn.Module, shared: Mapping[str, str]) -> Book:
    """Send labels through the graph and write down what happens to them. ``shared``: parameters not to be touched."""
    book, usage = Book(), Usage()
    values: dict[fx.Node, Value] = {}
    parameters = _parameters(program, model)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = parameters.get(node.name, none_like(node.meta.get("val")))
        elif node.op == "get_attr":
            values[node] = _constant(program.graph_module, str(node.target))
        elif node.op == "output":
            outputs = [n for n in tree_leaves(node.args) if isinstance(n, fx.Node)]
            _op(node, book, "output").stop([values[n] for n in outputs], "it is the model's output")
        else:
            values[node] = _call(node, book, values, usage)
    usage.spoil(book)
    for name, other in shared.items():
        _end_claims(book, name, f"{name} shares memory with {other}")
    return book


def _call(node: fx.Node, book: Book, values: dict[fx.Node, Value], usage: Usage) -> Value:
    op = _op(node, book, _name(node))
    args = [_resolve(a, values) for a in node.args]
    kwargs = {k: _resolve(v, values) for k, v in node.kwargs.items()}
    rule = RULES.get(op.name)
    given = list(args)
    view = _view(op, args[0]) if args else None
    if view is not None:
        return view
    if args and isinstance(args[0], Parameter) and op.name not in BINARY:
        args[0] = op.plain(args[0])
    if node.meta.get("val") is None and not node.users:
        result = None  # an assertion: it computes nothing
    elif rule is None:
        op.stop([*args, *kwargs.values()])
        result = op.nothing()
    else:
        result = rule(op, *args, **kwargs)
    for leaf in tree_leaves((given, kwargs)):
        if isinstance(leaf, Parameter) and leaf.trained:
            if leaf.name in op.understood:
                usage.understood.setdefault(leaf.name, []).append(op.place)
            else:
                usage.other[leaf.name] = f"{op.name} ({op.place})"
                if len(leaf.shape) > 1:
                    usage.matrices.add(leaf.name)
    return result


def _view(op: Op, value: Value) -> Parameter | None:
    """A parameter seen in another shape, or transposed, is still that parameter."""
    if not isinstance(value, Parameter) or not value.free:
        return None
    if op.name in ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_unsafe_view", "contiguous"):
        return replace(value, shape=tuple(op.shape))
    turns = op.name in ("t", "transpose", "permute", "numpy_T", "swapaxes", "swapdims")
    if turns and len(value.shape) == 2 and tuple(op.shape) == value.shape[::-1] and _swaps(op):
        return replace(value, transposed=True)
    return None


def _swaps(op: Op) -> bool:
    """Whether a matrix is really transposed (a square one could also be left as it is)."""
    order = next((a for a in op.node.args[1:] if isinstance(a, list | tuple)), [1, 0])
    return list(order) in ([1, 0], [-1, 0], [1, -2], [-1, -2])


def _resolve(argument: Any, values: dict[fx.Node, Value]) -> Any:
    if isinstance(argument, fx.Node):
        return values[argument]
    return [_resolve(a, values) for a in argument] if isinstance(argument, list | tuple) else argument


def _op(node: fx.Node, book: Book, name: str) -> Op:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return Op(node, book, name, where=_where(node), module=stack[-1][0] if stack else "")


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return getattr(node.target, "__name__", str(node.target))


def _where(node: fx.Node) -> str:
    """file.py:line of the last frame outside torch: a line the reader wrote or can look up."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(_TORCH)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


_TORCH = os.path.dirname(torch.__file__)


def _parameters(program: torch.export.ExportedProgram, model: nn.Module) -> dict[str, Parameter]:
    """Placeholder -> parameter, buffer or constant; a tied parameter goes by the first of its names."""
    first_names = {id(p): name for name, p in model.named_parameters()}
    names = {name: first_names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    signature = program.graph_signature
    shapes = {n.name: tuple(n.meta["val"].shape) for n in program.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    found = {p: Parameter(names[name], shapes[p], "parameter") for p, name in signature.inputs_to_parameters.items()}
    found |= {p: Parameter(name, shapes[p], "buffer") for p, name in signature.inputs_to_buffers.items()}
    constants = signature.inputs_to_lifted_tensor_constants
    return found | {p: Parameter(name, shapes[p], "constant") for p, name in constants.items()}


def _constant(module: nn.Module, name: str) -> Value:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return Parameter(name, tuple(value.shape), "constant") if isinstance(value, Tensor) else None
