"""Images to corrupt, and what several tests of corruptions ask of them."""

from functools import partial

import numpy as np
from PIL import Image

from pathprox.experiments.corruptions import (
    CIFAR10_C,
    CIFAR10_C_EXTRA,
    blocks,
    weather,
)

SEVERITIES = range(1, 6)
ALL_CIFAR = {**CIFAR10_C, **CIFAR10_C_EXTRA}


def random(seed=0):
    return np.random.default_rng(seed)


def digits(n=12):
    """Thick strokes on black, no two alike."""
    row, col = np.mgrid[:28, :28]
    start, slope = random(1).uniform(8, 20, (n, 1, 1)), random(2).uniform(-0.5, 0.5, (n, 1, 1))
    stroke = np.exp(-((row - start - slope * (col - 14)) ** 2) / 4) * (abs(col - 14) < 9)
    return (255 * stroke).astype(np.uint8)


def photos(n=12):
    """Smooth colours with an edge, no two alike."""
    x = blocks.gaussian(random(3).uniform(0, 1, (n, 32, 32, 3)), 2)
    x = (x - x.min()) / (x.max() - x.min()) * 0.7
    x[:, 10:20, 8:24] += 0.25
    return (255 * x).astype(np.uint8)


def labels(n=12):
    return np.arange(n) % 10


def blank(value=0, n=4, side=32):
    return np.full((n, side, side, 3) if side == 32 else (n, side, side), value, np.uint8)


def corrupt_photos(name, images, severity, generator=None):
    """Frost gets pictures of ice that are made here."""
    function = ALL_CIFAR[name]
    if name == "frost":
        function = partial(function, pictures=[random(4).integers(80, 255, (50, 60, 3), dtype=np.uint8)])
    return function(images, severity, generator or random())


def loaded(folder):
    return {path.relative_to(folder).as_posix(): np.load(path) for path in sorted(folder.rglob("*.npy"))}


def assert_same_files(first, second):
    first, second = loaded(first), loaded(second)
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def write_frost(folder):
    folder.mkdir()
    for i, name in enumerate(weather.FROST_FILES):
        Image.fromarray(random(i).integers(80, 255, (200 + 5 * i, 300, 3), dtype=np.uint8)).save(folder / name)
    return folder
