"""Make the small real MNIST subset that ships in the package, from the official files.

    python scripts/make_mnist_subset.py [DATA_FOLDER]

100 training images of each digit (as in the paper's Task 1), 1000 validation images from the rest of the training set
and 2000 test images, all drawn with a fixed seed. The four files of MNIST are in the folder ``mnist`` of the data
folder, which is $PATHPROX_DATA if it is not given.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pathprox.experiments.data import folder_of
from pathprox.experiments.data.sets import SEED, at_random, few_of_each, mnist_files

TARGET = Path(__file__).parent.parent / "src/pathprox/experiments/mnist_subset.npz"


def main(folder: Path, target: Path = TARGET) -> None:
    train, test = mnist_files(folder)
    random = np.random.default_rng(SEED)
    few, rest = few_of_each(train[1], at_random(random))
    parts = {
        "train": (*train, few),
        "val": (*train, np.sort(random.choice(rest, 1000, replace=False))),
        "test": (*test, np.sort(random.choice(len(test[1]), 2000, replace=False))),
    }
    arrays = {}
    for part, (images, labels, some) in parts.items():
        arrays |= {f"{part}_x": images[some, 0], f"{part}_y": labels[some].astype(np.uint8)}
    np.savez_compressed(target, **arrays)


if __name__ == "__main__":
    main(folder_of(Path(sys.argv[1]) if sys.argv[1:] else None))
