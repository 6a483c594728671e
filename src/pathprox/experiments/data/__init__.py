"""The data of the paper's experiments, read from the official files or fetched, as whole tensors of bytes."""

from __future__ import annotations

from pathprox.experiments.data.corrupted_sets import (
    CIFAR10_C,
    CIFAR10_C_EXTRA,
    CORRUPTED_NAMES,
    MNIST_C,
    Corrupted,
    corrupted,
)
from pathprox.experiments.data.sets import NAMES, Dataset, Split, load, mnist_subset, normalized
from pathprox.experiments.data.sources import SOURCES, Source, fetch, folder_of

__all__ = [
    "CIFAR10_C",
    "CIFAR10_C_EXTRA",
    "CORRUPTED_NAMES",
    "MNIST_C",
    "NAMES",
    "SOURCES",
    "Corrupted",
    "Dataset",
    "Source",
    "Split",
    "corrupted",
    "fetch",
    "folder_of",
    "load",
    "mnist_subset",
    "normalized",
]
