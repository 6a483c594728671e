"""The data sets the networks are trained on, each with its split into training, validation and test.

Every random choice is numpy's ``default_rng(42)``, but for the draw of the authors' code, which is torch's with that
seed: the same images everywhere and always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pathprox.experiments.data.archives import unpack
from pathprox.experiments.data.formats import (
    CLASSES,
    Images,
    Labels,
    damaged,
    read_cifar10_binary,
    read_cifar10_python,
    read_mnist,
    read_svhn,
)
from pathprox.experiments.data.plane import points
from pathprox.experiments.data.sources import SOURCES, absent, fetch, folder_of

SEED = 42
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PER_CLASS = 100
"""Training images of each digit in the paper's Task 1."""

Pair = tuple[Images, Labels]
Indices = NDArray[np.int64]
Pick = Callable[[Indices, int], Indices]
"""So many of these images."""


@dataclass(frozen=True)
class Split:
    """Images and labels, whole, as two tensors."""

    images: Tensor
    """Bytes, (n, channels, height, width)."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Three splits, and what training has to know about the images."""

    name: str
    train: Split
    val: Split
    test: Split
    mean: tuple[float, ...]
    """By channel, to be subtracted from pixels between 0 and 1."""
    std: tuple[float, ...]
    crop: int
    """Pixels of padding for random crops in training, 0 for none."""
    flip: bool
    """Whether training images are mirrored at random."""
    origin: str


@dataclass(frozen=True)
class _Recipe:
    """How a set is read, cut and shown."""

    source: str
    """Its name among the sources."""
    read: Callable[[Path], tuple[Pair, Pair]]
    """The official training and test images."""
    size: int
    """Official number of training images."""
    val: int
    """How many of them are for validation; a set of another size gives the same share."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    few: bool = False
    """Whether only `PER_CLASS` images a class are for training, all others for validation."""
    draw: int | None = 0
    """Which draw of those images; None: the one of the authors' code."""
    crop: int = 0
    flip: bool = False


def load(name: str, folder: Path | None = None, *, download: bool = False) -> Dataset:
    """A data set from the official files in the folder (see `folder_of`), which ``download`` fetches if need be."""
    if name in _OWN:
        return _OWN[name]()
    if name not in _RECIPES:
        raise ValueError(f"there is no data set {name!r}: choose one of {', '.join(NAMES)}.")
    recipe, folder = _RECIPES[name], folder_of(folder)
    try:
        both, test = recipe.read(folder)
    except FileNotFoundError:
        if not download:
            raise
        fetch(recipe.source, folder)
        both, test = recipe.read(folder)
    train, val = _cut(recipe, both[1])
    return Dataset(
        name=name,
        train=_split(both, train),
        val=_split(both, val),
        test=_split(test),
        mean=recipe.mean,
        std=recipe.std,
        crop=recipe.crop,
        flip=recipe.flip,
        origin=f"{recipe.source}, official format",
    )


def normalized(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes as float32: between 0 and 1, less the mean, by the standard deviation of their channel."""
    shift, scale = (torch.tensor(v, dtype=torch.float32, device=images.device).view(-1, 1, 1) for v in (mean, std))
    return images.to(torch.float32, copy=True).div_(255).sub_(shift).div_(scale)


def mnist_subset() -> dict[str, Split]:
    """The subset in the package: 100 training images of each digit, 1000 for validation, 2000 for test; normalised."""
    data = _embedded()
    parts = {"train": data.train, "val": data.val, "test": data.test}
    return {part: Split(normalized(s.images, data.mean, data.std), s.labels) for part, s in parts.items()}


def few_of_each(labels: Labels, pick: Pick, count: int | None = PER_CLASS) -> tuple[Indices, Indices]:
    """``count`` images of each class (for None as many as half of the class has, but no more), and all others."""
    chosen = []
    for label in range(CLASSES):
        there = np.flatnonzero(labels == label)
        take = min(PER_CLASS, len(there) // 2) if count is None else count
        if not 0 < take <= len(there):
            needed = f"{count or 'two or more'} images of each class are needed"
            raise ValueError(f"{needed}, and of the class {label} there are {len(there)}.")
        chosen.append(pick(there, take))
    train = np.sort(np.concatenate(chosen))
    return train, np.setdiff1d(np.arange(len(labels)), train)


def at_random(random: np.random.Generator) -> Pick:
    """Any of the images, each at most once."""
    return lambda there, take: random.choice(there, take, replace=False)


def _earliest(count: int) -> Pick:
    """Those that come first when all ``count`` images are shuffled, as in the authors' code."""
    place = torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).argsort().numpy()
    return lambda there, take: there[np.argsort(place[there])[:take]]


def mnist_files(folder: Path) -> tuple[Pair, Pair]:
    """The training and the test images of MNIST, (n, 1, 28, 28)."""
    _require("mnist", folder)
    train_x, train_y, test_x, test_y = (
        _first(folder / s.path, *(folder / i for i in s.instead)) for s in SOURCES["mnist"]
    )
    return read_mnist(train_x, train_y), read_mnist(test_x, test_y)


def _cifar10_files(folder: Path) -> tuple[Pair, Pair]:
    """The binary version if it is there, else the Python one; each in its folder or still packed."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    versions: tuple[tuple[str, str, str, Callable[[Path], Pair]], ...] = (
        ("cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz", read_cifar10_binary),
        ("cifar-10-batches-py", "", "cifar-10-python.tar.gz", read_cifar10_python),
    )
    for top, ending, archive, read in versions:
        if (folder / archive).is_file():
            unpack(folder / archive, top)
        if (folder / top).is_dir():
            paths = [folder / top / f"{name}{ending}" for name in names]
            for path in paths:
                if not path.is_file():
                    raise FileNotFoundError(f"there is no {path}: delete the folder {top} and fetch cifar10 again.")
            *batches, test = (read(path) for path in paths)
            _same_size(paths, batches)
            return (np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])), test
    raise absent("cifar10", folder, SOURCES["cifar10"])


def _same_size(paths: list[Path], batches: list[Pair]) -> None:
    """A batch that was cut between two images is noticed only by its size."""
    sizes = [len(labels) for _, labels in batches]
    for path, size in zip(paths, sizes, strict=False):
        if size != max(sizes):
            raise damaged(path, f"{max(sizes)} images, as in the other batches", f"{size}")


def _svhn_files(folder: Path) -> tuple[Pair, Pair]:
    _require("svhn", folder)
    train, test = (read_svhn(folder / source.path) for source in SOURCES["svhn"])
    return train, test


def _require(name: str, folder: Path) -> None:
    if missing := [source for source in SOURCES[name] if not source.needless(folder)]:
        raise absent(name, folder, missing)


def _first(*paths: Path) -> Path:
    return next(path for path in paths if path.exists())


_MNIST: dict[str, Any] = {"source": "mnist", "read": mnist_files, "size": 60000, "mean": MNIST_MEAN, "std": MNIST_STD}
_HALF = (0.5, 0.5, 0.5)
_COLOUR: dict[str, Any] = {"mean": CIFAR_MEAN, "std": CIFAR_STD}
_RECIPES = {
    "mnist-100": _Recipe(**_MNIST, val=59000, few=True),
    "mnist-100:authors": _Recipe(**_MNIST, val=59000, few=True, draw=None),
    **{f"mnist-100:{draw}": _Recipe(**_MNIST, val=59000, few=True, draw=draw) for draw in range(1, 6)},
    "mnist": _Recipe(**_MNIST, val=5000),
    "cifar10": _Recipe("cifar10", _cifar10_files, size=50000, val=5000, **_COLOUR, crop=4, flip=True),
    "svhn": _Recipe("svhn", _svhn_files, size=73257, val=6000, **_COLOUR),
    "svhn:half": _Recipe("svhn", _svhn_files, size=73257, val=6000, mean=_HALF, std=_HALF),  # pixels from -1 to 1
}


def _cut(recipe: _Recipe, labels: Labels) -> tuple[Indices, Indices]:
    """Which images are for training and which for validation, both in the order of the file.

    Validation has the first ones of a random permutation.
    """
    if recipe.few:
        pick = _earliest(len(labels)) if recipe.draw is None else at_random(np.random.default_rng(SEED + recipe.draw))
        return few_of_each(labels, pick, PER_CLASS if len(labels) == recipe.size else None)
    random = np.random.default_rng(SEED)
    order, val = random.permutation(len(labels)), max(1, len(labels) * recipe.val // recipe.size)
    return np.sort(order[val:]), np.sort(order[:val])


def _split(pair: Pair, some: Indices | slice = slice(None)) -> Split:
    images, labels = (np.array(array[some]) for array in pair)  # torch wants memory that it may write to
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _embedded() -> Dataset:
    with files("pathprox.experiments").joinpath("mnist_subset.npz").open("rb") as file, np.load(file) as arrays:
        train, val, test = (
            _split((arrays[f"{part}_x"][:, None], arrays[f"{part}_y"].astype(np.int64)))
            for part in ("train", "val", "test")
        )
    return Dataset("mnist-embedded", train, val, test, MNIST_MEAN, MNIST_STD, 0, False, "embedded subset")


def _plane() -> Dataset:
    """Points instead of images: 1/255 as the standard deviation makes `normalized` leave them as they are."""
    train, val, test = (Split(*points(SEED + i)) for i in range(3))
    return Dataset("plane", train, val, test, (0.0, 0.0), (1 / 255, 1 / 255), 0, False, "made by pathprox")


_OWN = {"mnist-embedded": _embedded, "plane": _plane}
NAMES = (*_OWN, *_RECIPES)
"""The sets that can be loaded; those of our own need no files."""
