"""The points of the plane that the paper's Figure 2 classifies. The paper shows such points but does not list them:
these are ours, two interleaved arcs and a few points on the wrong side."""

from __future__ import annotations

import math

import torch
from torch import Tensor

POINTS, OUTLIERS, NOISE = 200, 6, 0.12
"""In each split; of those as many have the other class's label; how far points are from their arc."""


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Points (n, 2, 1, 1), like images of one pixel and two channels, and their classes."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(POINTS) % 2
    angle = math.pi * torch.rand(POINTS, generator=random)
    sign = 1.0 - 2.0 * labels
    x = angle.cos() * sign + labels - 0.5
    y = angle.sin() * sign + 0.5 * labels - 0.25
    place = torch.stack([x, y], 1) + NOISE * torch.randn(POINTS, 2, generator=random)
    labels = torch.where(torch.arange(POINTS) < OUTLIERS, 1 - labels, labels)
    return place[:, :, None, None], labels
