"""What all regularisers share: being attached to an optimizer, and undisturbed training around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from pathprox.guard import Guard
from pathprox.slices import Slice
from pathprox.stepsize import Rule, rule_for, unwrapped
from pathprox.units import Units


class Regularizer(ABC):
    """A penalty that acts through a `torch.optim.Optimizer`, before or after each of its steps.

    Attach it after the optimizer is made; the training loop stays as it is. The regulariser, not the optimizer, is
    what to copy or pickle: it takes model and optimizer along and attaches itself to the copy.
    (`copy.deepcopy(optimizer)` alone drops all hooks.)
    """

    def __init__(self, units: Units, weight_decay: float, *, decoupled: bool | None = None) -> None:
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        self.units = units
        self.weight_decay = float(weight_decay)
        """Lambda, in the objective; may be changed between steps."""
        self.decoupled = decoupled
        """Whether the penalty goes around the optimizer's metric, as in AdamW. None: as the optimizer's own would."""
        self._optimizer: Optimizer | None = None
        self._guard = Guard()
        self._known: dict[str, nn.Parameter] = {}
        self._stepping: set[int] = set()
        self._handles: list[Any] = []
        self._kept = units.kept

    # What a regulariser is made of.

    @abstractmethod
    def _start_(self) -> None:
        """Called once, when attached."""

    @abstractmethod
    def _add_gradient_(self) -> None:
        """Add the penalty's gradient to ``.grad``, before the step."""

    @abstractmethod
    def _after_step_(self, ok: Tensor | None) -> None:
        """Change the weights after the step; not at all where ``ok`` is false."""

    def _takes_over(self) -> bool:
        """Asked before the step: whether `_after_step_` will do it, so that the optimizer has to skip its own."""
        return False

    def _follow_units_(self, kept: tuple[Tensor, ...]) -> None:
        """Called when units were removed; ``kept`` are the numbers of the units as they were before."""
        self._kept = self.units.kept

    # Attaching.

    def attach(self, optimizer: Optimizer) -> Self:
        """Act on every step of this optimizer from now on. Returns itself."""
        optimizer = unwrapped(optimizer)
        if self._optimizer is not None:
            raise RuntimeError(f"this {type(self).__name__} is already attached to an optimizer. Call detach() first.")
        rule_for(optimizer)
        self._refuse_unfit(optimizer, dict(self.units.model.named_parameters()))
        self._optimizer = optimizer
        try:
            with torch.no_grad():
                self._start_()
        except BaseException:
            self._optimizer = None
            raise
        self._hook()
        return self

    def detach(self) -> None:
        """Let the optimizer go its own way again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizer, self._known = [], None, {}

    def check(self) -> None:
        """Raise if a gradient was not finite since the last call. (On the CPU the step itself raises.)"""
        self._guard.check()

    @property
    def optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError(
                f"this {type(self).__name__} is not attached to an optimizer yet. Call attach(optimizer)."
            )
        return self._optimizer

    def _hook(self) -> None:
        self._known = dict(self.units.model.named_parameters(remove_duplicate=False))
        self._handles = [
            self.optimizer.register_step_pre_hook(_eager(self._before)),
            self.optimizer.register_step_post_hook(_eager(self._after)),
        ]

    def _refuse_unfit(self, optimizer: Optimizer, named: dict[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in named.items()}
        mine = [(names[id(p)], p, group) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not mine:
            raise ValueError(
                "the optimizer holds no parameter of the model that units were found in. Make it from that model's "
                "parameters(); if the model was copied after find_units, find the units of the copy."
            )
        for name, p, group in mine:
            if group.get("weight_decay"):
                raise ValueError(
                    f"the optimizer already has weight_decay={group['weight_decay']} (for {name}), so the weights "
                    f"would be penalised twice. Make it with weight_decay=0 and give the value to "
                    f"{type(self).__name__}(weight_decay=...) instead."
                )
            if hasattr(p, "full_tensor"):
                raise TypeError(
                    f"{name} is split over processes (FSDP or tensor parallelism), and a unit's norm takes all of it. "
                    "Use DistributedDataParallel."
                )
            if p.dtype in (torch.float16, torch.bfloat16):
                raise TypeError(
                    f"{name} is {p.dtype}: a threshold of lr * weight_decay vanishes in its rounding. Keep the "
                    "parameters in float32 and run the forward pass under torch.autocast."
                )

    # Around each step.

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare_gradients()
            return None
        wrapped = self._wrap(closure)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """With a closure the gradients exist only once it has run, inside the step."""
        prepare = _eager(self._prepare_gradients)

        def wrapped() -> Any:
            with torch.enable_grad():
                loss = closure()
            prepare()
            return loss

        return wrapped

    @torch.no_grad()
    def _prepare_gradients(self) -> None:
        named = dict(self.units.model.named_parameters())
        for name, p in named.items():
            if self._known.get(name) is not p:
                raise RuntimeError(
                    f"{name} is another parameter than when {type(self).__name__} was attached, so the optimizer does "
                    "not train it. Load weights without assign=True; after any other replacement make a new optimizer "
                    "and attach again."
                )
        self._refuse_unfit(self.optimizer, named)
        self._notice_removal()
        self._stepping = {id(p) for p in named.values() if p.grad is not None}
        if not self._takes_over():
            self._guard.before(self.optimizer, {id(p): name for name, p in named.items()})
        self._add_gradient_()

    def _notice_removal(self) -> None:
        """Units may have become fewer since the last step, through `shrink_`."""
        if self._kept is not self.units.kept:
            self._follow_units_(self._kept)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ok = self._guard.after(optimizer)
        if ok is None or ok.device.type != "cpu":
            self._after_step_(ok)
        elif ok:
            self._after_step_(None)

    # What the optimizer does with each parameter.

    def _options(self) -> dict[int, dict[str, Any]]:
        """The parameter group of every parameter that the optimizer trains."""
        return {id(p): group for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}

    def _is_decoupled(self, options: dict[str, Any]) -> bool:
        return self._rule.decoupled(options) if self.decoupled is None else self.decoupled

    @property
    def _rule(self) -> Rule:
        return rule_for(self.optimizer)

    def _step_size(self, parameter: nn.Parameter, options: dict[str, Any]) -> Tensor | float:
        """How far the step moved this parameter for each unit of gradient: a number, or one for each weight."""
        if self._is_decoupled(options):
            step: Tensor | float = options["lr"]
        else:
            step = self._rule.step(options, self.optimizer.state.get(parameter, {}))
        return step.reshape(()) if isinstance(step, Tensor) and step.numel() == 1 else step

    def _parameter(self, s: Slice) -> nn.Parameter:
        if s.name in self._known:  # looking through the modules takes its time
            return self._known[s.name]
        parameter = self.units.tensor(s.name)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    # Copying and saving.

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved beside the model and the optimizer."""
        return {"kind": type(self).__name__, "weight_decay": self.weight_decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the saved one would have."""
        if state.get("kind") != type(self).__name__:
            raise ValueError(
                f"this is the state of a {state.get('kind', 'something else')}, not of a {type(self).__name__}"
            )
        self.weight_decay = state["weight_decay"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._optimizer is not None:
            self._hook()

    def __repr__(self) -> str:
        where = f", attached to {type(self._optimizer).__name__}" if self._optimizer is not None else ""
        return f"{type(self).__name__}(weight_decay={self.weight_decay}, {self.units!r}{where})"


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that `torch.compile` calls and does not trace: it goes by the identity of parameters."""
    reason = "pathprox acts around optimizer.step(): compile the step without fullgraph=True"
    return torch.compiler.disable(function, reason=reason)
