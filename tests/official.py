"""Tiny data sets in the official formats, byte for byte: every class is a pattern of its own under some noise.

Training, test and corrupted images share the patterns, so that a network can learn them.
"""

import gzip
import io
import pickle
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from scipy.io import savemat

from pathprox.experiments.data import CIFAR10_C, MNIST_C

PARTS = {"train": 1, "test": 2}


def digits(part: str, n: int, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """``n`` images (n, channels, height, width) of bytes, and their labels, every class equally often."""
    channels, height, width = shape
    # Patterns of 4 x 4 pixels, which no crop by a few pixels can hide.
    coarse = np.random.default_rng(0).integers(0, 200, (10, channels, height // 4, width // 4))
    patterns = coarse.repeat(4, 2).repeat(4, 3)
    random = np.random.default_rng([PARTS[part], n])
    labels = random.permutation(np.arange(n) % 10)
    return (patterns[labels] + random.integers(0, 56, (n, *shape))).astype(np.uint8), labels


def write_mnist(folder: Path, train: int = 600, test: int = 100, *, packed: bool = True) -> None:
    """``mnist/``: four IDX files, gzipped or not."""
    (folder / "mnist").mkdir(parents=True, exist_ok=True)
    for part, n, stem in (("train", train, "train"), ("test", test, "t10k")):
        images, labels = digits(part, n, (1, 28, 28))
        files = {
            f"{stem}-images-idx3-ubyte": struct.pack(">IIII", 0x803, n, 28, 28) + images.tobytes(),
            f"{stem}-labels-idx1-ubyte": struct.pack(">II", 0x801, n) + labels.astype(np.uint8).tobytes(),
        }
        for name, data in files.items():
            path = folder / "mnist" / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data, 1) if packed else data)


def write_cifar10(folder: Path, python: bool = False, train: int = 500, test: int = 100) -> None:
    """``cifar-10-batches-bin/`` or ``cifar-10-batches-py/``: five batches of training images and one of test images."""
    top = folder / ("cifar-10-batches-py" if python else "cifar-10-batches-bin")
    top.mkdir(parents=True, exist_ok=True)
    images, labels = digits("train", train, (3, 32, 32))
    fifths = zip(images.reshape(5, -1, 3, 32, 32), labels.reshape(5, -1), strict=True)
    batches = {f"data_batch_{i}": batch for i, batch in enumerate(fifths, 1)}
    for name, (x, y) in (batches | {"test_batch": digits("test", test, (3, 32, 32))}).items():
        rows = x.reshape(len(x), -1)
        if python:
            batch = {"batch_label": name, "labels": y.tolist(), "data": rows, "filenames": ["a_s_000001.png"] * len(y)}
            (top / name).write_bytes(python2_pickle(batch))
        else:
            (top / f"{name}.bin").write_bytes(np.hstack([y[:, None].astype(np.uint8), rows]).tobytes())


def write_svhn(folder: Path, train: int = 500, test: int = 100) -> None:
    """``svhn/``: two Matlab files, with the digit 0 labelled 10."""
    (folder / "svhn").mkdir(parents=True, exist_ok=True)
    for part, n in (("train", train), ("test", test)):
        images, labels = digits(part, n, (3, 32, 32))
        content = {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]}
        savemat(folder / "svhn" / f"{part}_32x32.mat", content, do_compression=True)


def write_mnist_c(
    folder: Path, n: int = 50, corruptions: tuple[str, ...] = MNIST_C, *, generated: bool = False
) -> None:
    """``mnist_c/``: a folder for each corruption."""
    images, labels = digits("test", n, (1, 28, 28))
    for i, corruption in enumerate(corruptions):
        place = folder / ("mnist_c-generated" if generated else "mnist_c") / corruption
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / "test_images.npy", disturbed(images, 10 * i))
        np.save(place / "test_labels.npy", labels)


def write_cifar10_c(
    folder: Path, n: int = 20, corruptions: tuple[str, ...] = CIFAR10_C, *, generated: bool = False
) -> None:
    """``CIFAR-10-C/``: a file for each corruption, with ``n`` images of each of the five severities; labels for all."""
    place = folder / ("CIFAR-10-C-generated" if generated else "CIFAR-10-C")
    place.mkdir(parents=True, exist_ok=True)
    images, labels = digits("test", n, (3, 32, 32))
    for i, corruption in enumerate(corruptions):
        np.save(place / f"{corruption}.npy", np.concatenate([disturbed(images, 10 * i + 5 * s) for s in range(1, 6)]))
    np.save(place / "labels.npy", np.tile(labels, 5).astype(np.uint8))


def disturbed(images: np.ndarray, strength: int) -> np.ndarray:
    """Darker by ``strength``, with the channels last, as the corrupted sets have them."""
    return np.clip(images.transpose(0, 2, 3, 1).astype(int) - strength, 0, 255).astype(np.uint8)


def pack(folder: Path, top: str, archive: str) -> Path:
    """Put the folder ``top`` into an archive beside it, in its place."""
    path = folder / archive
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for file in sorted(p for p in (folder / top).rglob("*") if p.is_file()):
                zipped.write(file, file.relative_to(folder))
    else:
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            tar.add(folder / top, top)
    shutil.rmtree(folder / top)
    return path


class _Python2(pickle._Pickler):
    """Writes as Python 2 and its numpy did: all text is bytes, all flags are numbers."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_text(self, text: bytes | str) -> None:
        data = text if isinstance(text, bytes) else text.encode("ascii")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    def save_flag(self, flag: bool) -> None:
        self.write(pickle.BININT1 + bytes([flag]))

    dispatch[bytes] = dispatch[str] = save_text
    dispatch[bool] = save_flag


def python2_pickle(batch: dict) -> bytes:
    file = io.BytesIO()
    _Python2(file, 2).dump(batch)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def same(one, other):
    return all(
        torch.equal(getattr(a, field), getattr(b, field))
        for a, b in ((one.train, other.train), (one.val, other.val), (one.test, other.test))
        for field in ("images", "labels")
    )


def left(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def half(old):
    return old[: len(old) // 2]
