"""What PathProx has to know of an optimizer: its step size, and how its memory follows a rescaled weight.

The step size of a weight is how far the optimizer moves it, in the long run, for each unit of a *constant* gradient.
That is the number the proximal step needs, for then its fixed points are the stationary points of the objective: the
move ``step * gradient`` is undone by the threshold ``step * weight_decay``. It is ``lr`` for plain SGD but ``lr / (1
- momentum)`` with momentum, whose buffer adds up 1/(1 - momentum) gradients, and ``lr / (sqrt(second moment) +
eps)``, another number for every weight, for Adam.

A new optimizer is one entry in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim

Options = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    step: Callable[[Options, State], Tensor | float]
    """The step size, from the group's options and the parameter's state after a step: a number, or one a weight."""
    powers: Mapping[str, int] = field(default_factory=dict)
    """State tensors that follow a weight: multiplied by factor**power when the weight is multiplied by factor."""
    largest: Callable[[Options], Any] = lambda options: None
    """How far an adaptive optimizer moves a weight at most, about, in a step; None where nothing bounds it."""
    decoupled: Callable[[Options], bool] = lambda options: bool(options.get("decoupled_weight_decay", False))
    """Whether the optimizer's own weight decay is of the decoupled kind."""
    per_weight: bool = True
    """Whether the step size may be another one for every weight; if not, it does not need the state."""


def _sgd(options: Options, state: State) -> Tensor | float:
    momentum = options["momentum"]
    return options["lr"] * (1 - options["dampening"]) / (1 - momentum) if momentum else options["lr"]


def _time(state: State) -> Tensor | float:
    """The number of steps: a tensor only where it lives on a GPU, so that reading it costs no synchronisation."""
    step = state["step"]
    if not isinstance(step, Tensor) or step.device.type == "cpu":
        return float(step)
    return step if step.device.type == "mps" else step.double()  # 1 - 0.999**step loses four digits in float32


def _second_moment(options: Options, state: State, key: str = "exp_avg_sq") -> Tensor:
    correction = 1 - options["betas"][1] ** _time(state)
    moment: Tensor = state[key]
    return (moment / correction).sqrt() + options["eps"]


def _adam(options: Options, state: State) -> Tensor:
    return options["lr"] / _second_moment(options, state, "max_exp_avg_sq" if options["amsgrad"] else "exp_avg_sq")


def _nadam(options: Options, state: State) -> Tensor:
    return options["lr"] / _second_moment(options, state)


def _radam(options: Options, state: State) -> Tensor:
    beta, t = options["betas"][1], _time(state)
    moment: Tensor = state["exp_avg_sq"]
    longest = 2 / (1 - beta) - 1
    length = torch.as_tensor(longest - 2 * t * beta**t / (1 - beta**t))
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    rectified = rectified.nan_to_num(0, 0, 0)  # it is used only where length > 5
    adaptive = (rectified.clamp_min(0) * (1 - beta**t)).sqrt() / (moment.sqrt() + options["eps"])
    adapts = (length > 5).to(length)  # before that, steps are plain
    return options["lr"] * (adapts * adaptive + (1 - adapts))


def _adamax(options: Options, state: State) -> Tensor:
    return options["lr"] / state["exp_inf"]


def _adagrad(options: Options, state: State) -> Tensor:
    rate = options["lr"] / (1 + (_time(state) - 1) * options["lr_decay"])
    return rate / (state["sum"].sqrt() + options["eps"])


def _rmsprop(options: Options, state: State) -> Tensor:
    moment: Tensor = state["square_avg"]
    if options["centered"]:
        moment = (moment - state["grad_avg"].square()).clamp_min(0)
    return options["lr"] / (1 - options["momentum"]) / (moment.sqrt() + options["eps"])


def _adadelta(options: Options, state: State) -> Tensor:
    ratio: Tensor = (state["acc_delta"] + options["eps"]) / (state["square_avg"] + options["eps"])
    return options["lr"] * ratio.sqrt()


def _lr(options: Options) -> Any:
    return options["lr"]


_MOMENTS = {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2}

RULES: dict[type[optim.Optimizer], Rule] = {
    optim.SGD: Rule(_sgd, {"momentum_buffer": -1}, per_weight=False),
    optim.AdamW: Rule(_adam, _MOMENTS, _lr, decoupled=lambda options: True),
    optim.Adam: Rule(_adam, _MOMENTS, _lr),
    optim.NAdam: Rule(_nadam, _MOMENTS, _lr),
    optim.RAdam: Rule(_radam, _MOMENTS, _lr),
    optim.Adamax: Rule(_adamax, {"exp_avg": -1, "exp_inf": -1}, _lr),
    optim.Adagrad: Rule(_adagrad, {"sum": -2}, _lr),
    optim.RMSprop: Rule(
        _rmsprop,
        {"square_avg": -2, "grad_avg": -1, "momentum_buffer": 0},
        lambda options: options["lr"] / (1 - options["momentum"]),
    ),
    optim.Adadelta: Rule(_adadelta, {"square_avg": -2, "acc_delta": 2}),
}

REFUSED: dict[str, str] = {
    "ASGD": "it decays the weights by itself (lambd), and its result is an average in which no unit is exactly zero",
    "Adafactor": "it clips its steps by the size of the whole update, so its state does not tell a weight's step size",
    "LBFGS": "it mixes the gradients of several points into one direction, so a weight has no step size of its own",
    "Muon": "it orthogonalises the update, so a weight has no step size of its own",
    "Rprop": "it uses the gradient's sign alone, so nothing says how a penalty weighs against the loss",
    "SparseAdam": "it moves only the rows that had a gradient, and the proximal step moves all",
}


WRAPPERS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose wrappers do nothing to a step but skip it, so that what is attached may sit inside."""


def unwrapped(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer that steps, without the wrapper of a training framework."""
    if type(optimizer).__module__.partition(".")[0] not in WRAPPERS:
        return optimizer
    return unwrapped(getattr(optimizer, "optimizer", optimizer))


def rule_for(optimizer: optim.Optimizer) -> Rule:
    """The rule of the optimizer's class or of the nearest one it inherits from."""
    for kind in type(optimizer).__mro__:
        if kind in RULES:
            return RULES[kind]
        if kind.__name__ in REFUSED and kind.__module__.startswith("torch.optim"):
            raise TypeError(f"PathProx cannot follow torch.optim.{kind.__name__}: {REFUSED[kind.__name__]}. {_CURE}")
    raise TypeError(
        f"PathProx does not know the step size of {type(optimizer).__name__}. {_CURE} For an optimizer of your own, "
        "say how it steps: pathprox.stepsize.RULES[YourOptimizer] = pathprox.stepsize.Rule(step=...)."
    )


_CURE = f"Use one of {', '.join(kind.__name__ for kind in RULES)}."


def carry_state_(optimizer: optim.Optimizer, parameter: Tensor, multiply_: Callable[[Tensor, int], None]) -> None:
    """A weight was rescaled without changing the function: let the optimizer's memory of its gradients follow.

    ``multiply_(tensor, power)`` multiplies a tensor shaped like the parameter by the weight's factor to that power.
    """
    state = optimizer.state.get(parameter)
    if state:
        for key, power in rule_for(optimizer).powers.items():
            if power and isinstance(state.get(key), Tensor):
                multiply_(state[key], power)
