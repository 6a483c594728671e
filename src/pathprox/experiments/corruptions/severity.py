"""The five strengths of a corruption of CIFAR-10-C."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pathprox.experiments.corruptions.blocks import Floats, Images

T = TypeVar("T")


def at(severity: int, *constants: T) -> T:
    """The constant of a severity from 1 to 5."""
    if severity not in range(1, len(constants) + 1):
        raise ValueError(f"severity {severity} does not exist: choose one of 1 to {len(constants)}")
    return constants[severity - 1]


def to_bytes(x: Floats) -> Images:
    """The fraction is cut off, not rounded: so the published set was stored, and it is half a grey level darker."""
    return (x.clip(0, 1) * 255).astype(np.uint8)
