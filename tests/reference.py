"""The slow, obvious twin: Algorithm 1 on a chain of linear layers, one unit at a time, as the paper writes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ReferencePathProx:
    """Owns its SGD. ``layers`` are linear layers in order; (0, 1), (2, 3), ... are coupled, a last odd one is other."""

    def __init__(
        self, layers: list[nn.Linear], lr: float, weight_decay: float, momentum: float = 0.0, balance: bool = True
    ):
        self.layers, self.lr, self.weight_decay, self.momentum, self.balance = (
            layers,
            lr,
            weight_decay,
            momentum,
            balance,
        )
        self.pairs = [(layers[i], layers[i + 1]) for i in range(0, len(layers) - 1, 2)]
        self.buffers: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            for first, second in self.pairs:
                for i in range(first.out_features):
                    norm = first.weight[i].norm()
                    first.weight[i] /= norm
                    first.bias[i] /= norm
                    second.weight[:, i] *= norm
            if balance:
                self.balance_layers()

    @torch.no_grad()
    def step(self) -> None:
        self.gradient_step()
        self.project_w()
        self.threshold_v()
        if self.balance:
            self.balance_layers()

    def project_w(self) -> None:
        for first, _ in self.pairs:
            for i in range(first.out_features):
                first.weight[i] /= first.weight[i].norm()

    def threshold_v(self) -> None:
        """And decay the layer that is left over."""
        step = self.lr / (1 - self.momentum)
        for first, second in self.pairs:
            for i in range(first.out_features):
                v = second.weight[:, i]
                norm = v.norm()
                if norm <= step * self.weight_decay:
                    v.zero_()
                else:
                    v *= 1 - step * self.weight_decay / norm
        if len(self.layers) % 2:
            self.layers[-1].weight /= 1 + step * self.weight_decay

    def gradient_step(self) -> None:
        for layer in self.layers:
            for p in (layer.weight, layer.bias):
                if self.momentum:
                    buffer = self.buffers.get(p)
                    self.buffers[p] = p.grad.clone() if buffer is None else self.momentum * buffer + p.grad
                p -= self.lr * (self.buffers[p] if self.momentum else p.grad)

    def balance_layers(self) -> None:
        totals = []
        for first, second in self.pairs:
            totals.append(sum(first.weight[i].norm() * second.weight[:, i].norm() for i in range(first.out_features)))
        if min(totals) == 0:
            return
        logs = torch.stack(totals).log()
        steps = logs.mean() - logs
        if steps.abs().max() > math.log(10):
            return
        behind = torch.ones(())
        for factor, (first, second) in zip(steps.exp(), self.pairs, strict=True):
            self.scale(first.bias, behind)
            self.scale(second.weight, factor)
            behind = behind * factor
            self.scale(second.bias, behind)

    def scale(self, p: Tensor, factor: Tensor) -> None:
        p *= factor
        if p in self.buffers:
            self.buffers[p] /= factor
