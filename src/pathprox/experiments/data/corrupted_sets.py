"""MNIST-C and CIFAR-10-C: the test images, disturbed in many ways, to see how a network bears it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pathprox.experiments.data.archives import unpack
from pathprox.experiments.data.formats import Labels, checked_labels, damaged, open_array
from pathprox.experiments.data.sets import Split
from pathprox.experiments.data.sources import SOURCES, folder_of

MNIST_C = (
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "shear",
    "scale",
    "rotate",
    "brightness",
    "translate",
    "stripe",
    "fog",
    "spatter",
    "dotted_line",
    "zigzag",
    "canny_edges",
)
CIFAR10_C = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
CIFAR10_C_EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""In the official archive as well, but not among the fifteen that are averaged."""


@dataclass(frozen=True)
class _Layout:
    top: str
    """The folder, and what its archive unpacks to."""
    images: str
    """The file of a corruption in it."""
    labels: str
    shape: tuple[int, int, int]
    severities: int
    """How many blocks of equal size a file has, from weak to strong."""
    corruptions: tuple[str, ...]
    extra: tuple[str, ...] = ()

    def files(self, folder: Path, corruption: str) -> tuple[Path, Path]:
        return folder / self.images.format(corruption), folder / self.labels.format(corruption)


_LAYOUTS = {
    "mnist-c": _Layout("mnist_c", "{}/test_images.npy", "{}/test_labels.npy", (28, 28, 1), 1, MNIST_C),
    "cifar10-c": _Layout("CIFAR-10-C", "{}.npy", "labels.npy", (32, 32, 3), 5, CIFAR10_C, CIFAR10_C_EXTRA),
}
CORRUPTED_NAMES = tuple(_LAYOUTS)


@dataclass(frozen=True)
class Corrupted:
    """Files of disturbed test images, in one folder."""

    name: str
    origin: str
    """``official`` or ``generated``."""
    missing: tuple[str, ...]
    """Corruptions without a file."""
    folder: Path
    corruptions: tuple[str, ...]
    """Those with one."""

    def parts(self) -> Iterator[tuple[str, Split]]:
        """One corruption after the other, each in memory only while it is looked at.

        They are called like ``fog``; where there are several severities like ``fog/1`` to ``fog/5``.
        """
        layout = _LAYOUTS[self.name]
        for corruption in self.corruptions:
            images, labels = _open(layout, self.folder, corruption)
            count = len(labels) // layout.severities
            for i in range(layout.severities):
                some = slice(i * count, (i + 1) * count)
                pixels = np.array(images[some].transpose(0, 3, 1, 2), order="C")
                label = corruption if layout.severities == 1 else f"{corruption}/{i + 1}"
                yield label, Split(torch.from_numpy(pixels), torch.from_numpy(labels[some].copy()))


def corrupted(name: str, folder: Path | None = None, *, extra: bool = False) -> Corrupted:
    """The official corrupted test images if any are there, else those that pathprox made itself.

    The files are looked at now and read later, by `Corrupted.parts`.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"there is no corrupted set {name!r}: choose one of {', '.join(CORRUPTED_NAMES)}.")
    layout, folder = _LAYOUTS[name], folder_of(folder)
    archive = folder / SOURCES[name][0].path
    if archive.is_file():
        unpack(archive, layout.top)
    wanted = layout.corruptions + (layout.extra if extra else ())
    for origin, place in (("official", folder / layout.top), ("generated", folder / f"{layout.top}-generated")):
        there = tuple(c for c in wanted if all(path.is_file() for path in layout.files(place, c)))
        for corruption in there:
            _open(layout, place, corruption)
        if there:
            return Corrupted(name, origin, tuple(c for c in wanted if c not in there), place, there)
    raise _absent(name, layout, folder)


def _open(layout: _Layout, folder: Path, corruption: str) -> tuple[np.ndarray, Labels]:
    """The images, still in the file, and their labels."""
    images_path, labels_path = layout.files(folder, corruption)
    images = open_array(images_path)
    if images.dtype != np.uint8 or images.shape[1:] != layout.shape or not len(images):
        shape = ", ".join(map(str, layout.shape))
        raise damaged(images_path, f"bytes in the shape (n, {shape})", f"{images.dtype} in the shape {images.shape}")
    if len(images) % layout.severities:
        raise damaged(images_path, f"{layout.severities} severities of equal size", f"{len(images)} images")
    return images, checked_labels(labels_path, open_array(labels_path), len(images))


def _absent(name: str, layout: _Layout, folder: Path) -> FileNotFoundError:
    images, labels = layout.files(folder / layout.top, "NAME")
    source = SOURCES[name][0]
    return FileNotFoundError(
        f"{name} is not there. Expected are {images} and {labels}, where NAME is {', '.join(layout.corruptions)}. "
        f"Either put the official archive {source.path} from {source.addresses[0]} into {folder} "
        f"(`pathprox data fetch {name}` does so), or make them from the test images with `pathprox data make {name}`, "
        f"which writes to {folder / layout.top}-generated."
    )
