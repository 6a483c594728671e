"""Readers of the official files, each checked while it is read: nothing is believed that can be verified.

Images come as bytes in the order (n, channels, height, width), labels as numbers from 0 to 9.
"""

from __future__ import annotations

import gzip
import importlib
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

CLASSES = 10
IDX_IMAGES, IDX_LABELS = 0x00000803, 0x00000801
"""The first four bytes of MNIST's files: unsigned bytes, in three dimensions and in one."""
CIFAR_RECORD = 1 + 3 * 32 * 32


def damaged(path: Path, expected: str, found: str) -> ValueError:
    return ValueError(f"{path} is damaged or another file: expected {expected}, found {found}. Delete it, fetch again.")


def read_mnist(images: Path, labels: Path) -> tuple[Images, Labels]:
    """A pair of IDX files, gzipped or not."""
    pixels = _read_idx(images, IDX_IMAGES, (28, 28))
    return pixels[:, None], checked_labels(labels, _read_idx(labels, IDX_LABELS, ()), len(pixels))


def read_cifar10_binary(path: Path) -> tuple[Images, Labels]:
    """One batch of the binary version: a byte of label and three planes of pixels, again and again."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % CIFAR_RECORD:
        raise damaged(path, f"records of {CIFAR_RECORD} bytes", f"{len(data)} bytes")
    records = data.reshape(-1, CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), checked_labels(path, records[:, 0], len(records))


def read_cifar10_python(path: Path) -> tuple[Images, Labels]:
    """One batch of the Python version, a pickle of a dict, without running anything that the pickle might ask for."""
    try:
        with path.open("rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except Exception as error:  # bytes that are no pickle raise whatever they like
        raise damaged(path, "a pickled batch of CIFAR-10", _said(error)) from error
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (CIFAR_RECORD - 1,):
        raise damaged(path, f"rows of {CIFAR_RECORD - 1} bytes", _kind(pixels))
    return pixels.reshape(-1, 3, 32, 32), checked_labels(path, labels, len(pixels))


def read_svhn(path: Path) -> tuple[Images, Labels]:
    """The cropped digits, a Matlab file of version 5; its label 10 is the digit 0."""
    try:
        matlab = importlib.import_module("scipy.io")
    except ImportError as error:
        raise ImportError("SVHN's files are Matlab's, which scipy reads: pip install scipy") from error
    try:
        with path.open("rb") as file:
            content = matlab.loadmat(file, variable_names=("X", "y"))
        x, y = content["X"], content["y"].reshape(-1)
    except Exception as error:  # scipy raises many kinds on damaged files
        raise damaged(path, "a Matlab file with X and y", _said(error)) from error
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise damaged(path, "X of bytes in the shape (32, 32, 3, n)", _kind(x))
    images = np.ascontiguousarray(x.transpose(3, 2, 0, 1))
    return images, checked_labels(path, y, len(images), first=1) % CLASSES


def open_array(path: Path) -> NDArray[Any]:
    """An .npy file, mapped into memory: what is not looked at is not read."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise damaged(path, "an array in numpy's format", _said(error)) from error
    if not isinstance(array, np.ndarray):
        raise damaged(path, "one array", "an archive of several")
    return array


def checked_labels(path: Path, labels: NDArray[Any], count: int, first: int = 0) -> Labels:
    """``count`` of them, whole numbers from ``first`` on, one for each class."""
    if labels.shape != (count,):
        raise damaged(path, f"{count} labels, one for each image", f"the shape {labels.shape}")
    if not count or labels.dtype.kind not in "iu":
        raise damaged(path, "labels that are whole numbers", _kind(labels))
    low, high = int(labels.min()), int(labels.max())
    if low < first or high >= first + CLASSES:
        raise damaged(path, f"labels from {first} to {first + CLASSES - 1}", f"{low} to {high}")
    return labels.astype(np.int64)


def _read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> Images:
    """Big-endian numbers: the magic one, how many entries, their shape; then the bytes."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, "a gzipped file", _said(error)) from error
    size = 4 * (2 + len(shape))
    header = np.frombuffer(data[: len(data[:size]) // 4 * 4], ">u4").tolist()
    if len(header) < 2 + len(shape) or header[0] != magic or tuple(header[2:]) != shape:
        raise damaged(path, f"a header [{magic}, n, {', '.join(map(str, shape))}]", f"{header}")
    if len(data) - size != header[1] * int(np.prod(shape)):
        raise damaged(path, f"{header[1]} times {shape or 1} bytes after the header", f"{len(data) - size} bytes")
    return np.frombuffer(data, np.uint8, offset=size).reshape(-1, *shape)


class _Unpickler(pickle.Unpickler):
    """Plain containers and arrays of bytes, nothing else: a pickle can name any function and have it called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return lambda code, align=False, copy=True: _byte(code)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name}, which has no place in a batch of images")


def _byte(code: str | bytes) -> np.dtype[np.uint8]:
    """The only dtype there may be; the official pickles have its flags as numbers, which numpy deprecates."""
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array of {code!r}")
    return np.dtype(np.uint8, copy=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kind(found: object) -> str:
    return f"{found.dtype} in the shape {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
