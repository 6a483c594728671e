"""Make the small real MNIST subset that ships in the package, from the official files.

    python scripts/make_mnist_subset.py FOLDER_WITH_THE_FOUR_IDX_GZ_FILES

100 training images of each digit (as in the paper's Task 1), 1000 validation images from the rest of the training set
and 2000 test images, all drawn with a fixed seed.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent.parent / "src/pathprox/experiments/mnist_subset.npz"


def read(folder: Path, name: str, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)


def main(folder: Path) -> None:
    x, y = (
        read(folder, "train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28),
        read(folder, "train-labels-idx1-ubyte.gz", 8),
    )
    tx, ty = (
        read(folder, "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28),
        read(folder, "t10k-labels-idx1-ubyte.gz", 8),
    )
    random = np.random.default_rng(42)
    train = np.sort(
        np.concatenate([random.choice(np.flatnonzero(y == digit), 100, replace=False) for digit in range(10)])
    )
    rest = np.setdiff1d(np.arange(len(y)), train)
    val = np.sort(random.choice(rest, 1000, replace=False))
    test = np.sort(random.choice(len(ty), 2000, replace=False))
    np.savez_compressed(
        TARGET, train_x=x[train], train_y=y[train], val_x=x[val], val_y=y[val], test_x=tx[test], test_y=ty[test]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
