"""The networks of the paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """MLP-d-n: ``depth`` linear layers, ``width`` ReLU neurons in each hidden one.

    ``factorized``: each of the ``depth`` layers is two, with ReLU after the first of each pair alone, so that every
    hidden neuron is a unit of one coupling (784 x n, ReLU, n x n), (n x n, ReLU, n x n), ..., (n x n, ReLU, n x
    classes).
    """

    def __init__(self, depth: int, width: int, factorized: bool = False, inputs: int = 784, classes: int = 10) -> None:
        super().__init__()
        count = 2 * depth if factorized else depth
        sizes = [inputs, *[width] * (count - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.factorized = factorized

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < last and not (self.factorized and i % 2):
                x = torch.relu(x)
        return x


VGG19: tuple[int | str, ...] = (64, 64, "M", 128, 128, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4, "A")


class VGG(nn.Module):
    """VGG for 32 x 32 images: convolutions and pooling as in ``plan``, then one linear layer; Kaiming normal start."""

    def __init__(
        self, plan: Sequence[int | str] = VGG19, batch_norm: bool = False, channels: int = 3, classes: int = 10
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for step in plan:
            if isinstance(step, str):
                layers.append({"M": nn.MaxPool2d, "A": nn.AvgPool2d}[step](2))
                continue
            layers.append(nn.Conv2d(channels, step, 3, padding=1))
            layers += [nn.BatchNorm2d(step)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = step
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def build(name: str, meta: bool = False) -> nn.Module:
    """The network of that name: MLP-d-n, MLP-d-n factorized, VGG19, VGG19 bn, VGG-tiny or shallow-n.

    MLP-3-800 has four linear layers, as the paper's table of architectures has it, and so as many neurons as its
    factorized form; other MLP-d-n have d. ``meta``: without memory for the weights, to see whether there is such a
    network.
    """
    with torch.device("meta" if meta else "cpu"):
        if name == "MLP-3-800":
            return MLP(4, 800)
        if name in _VGG:
            plan, batch_norm = _VGG[name]
            return VGG(plan, batch_norm)
        found = re.fullmatch(r"MLP-([1-9]\d*)-([1-9]\d*)( factorized)?", name)
        if found:
            return MLP(int(found[1]), int(found[2]), factorized=bool(found[3]))
        found = re.fullmatch(r"shallow-([1-9]\d*)", name)
        if found:
            return MLP(2, int(found[1]), inputs=2, classes=2)
    known = ", ".join(("MLP-d-n", "MLP-d-n factorized", *_VGG, "shallow-n"))
    raise ValueError(f"there is no network {name!r}; write one of {known}")


_VGG: dict[str, tuple[tuple[int | str, ...], bool]] = {
    "VGG19": (VGG19, False),
    "VGG19 bn": (VGG19, True),
    "VGG-tiny": ((8, 8, "M", 16, 16, "M", 16, 16, "M", 16, "A", "A"), False),
}
