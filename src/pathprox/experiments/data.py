"""The data of the experiments: for now the small real MNIST subset that ships with the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


@dataclass(frozen=True)
class Split:
    """Images and labels, whole, as two tensors."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def mnist_subset() -> dict[str, Split]:
    """100 training images of each digit, 1000 for validation and 2000 for testing: normalised,  (n, 1, 28, 28)."""
    with files("pathprox.experiments").joinpath("mnist_subset.npz").open("rb") as file, np.load(file) as arrays:
        return {part: _split(arrays[f"{part}_x"], arrays[f"{part}_y"]) for part in ("train", "val", "test")}


def _split(images: np.ndarray, labels: np.ndarray) -> Split:
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    return Split(((pixels - MNIST_MEAN) / MNIST_STD).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))
