"""Corruptions of the real data, against what the published programs gave when they were run on it once."""

import gzip
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from corrupting import (
    ALL_CIFAR,
    SEVERITIES,
    random,
)
from pathprox.experiments.corruptions import (
    MNIST_C,
    weather,
)

MNIST_STATISTICS = """
shot_noise 10.91/25.60/69.19
impulse_noise 21.67/47.59/94.25
glass_blur 19.30/31.03/60.40
motion_blur 24.56/30.90/56.80
shear 28.25/33.77/73.39
scale 27.84/15.27/52.19
rotate 28.02/31.17/71.18
brightness 115.73/146.91/43.54
translate 46.30/31.03/75.96
stripe 126.19/154.28/119.79
fog 91.79/104.14/42.09
spatter 8.35/35.28/72.10
dotted_line 6.07/37.25/81.14
zigzag 12.22/43.39/86.24
canny_edges 41.06/27.24/78.77
"""
"""On the first 1000 test digits: mean absolute change, mean, standard deviation."""

CIFAR_STATISTICS = """
gaussian_noise 7.98/123.0/65.3 11.88/122.9/65.9 15.71/122.9/66.8 17.61/122.9/67.3 19.46/122.9/67.9
shot_noise 5.95/122.9/65.0 8.37/122.8/65.3 13.10/122.6/66.2 15.07/122.5/66.7 18.31/122.2/67.6
impulse_noise 1.24/123.5/65.7 2.53/123.6/66.7 3.83/123.6/67.6 6.38/123.7/69.3 8.90/123.8/71.0
defocus_blur 1.38/123.0/64.1 3.32/123.0/63.1 5.00/123.0/62.4 6.51/123.0/61.9 9.27/123.0/60.7
glass_blur 11.16/123.8/65.0 11.33/122.8/64.7 11.11/122.8/63.4 18.20/123.1/64.9 17.43/123.1/63.5
motion_blur 7.03/123.0/63.1 10.48/122.9/62.1 13.18/122.9/61.2 13.14/123.0/61.2 15.22/122.8/60.4
zoom_blur 8.80/123.0/62.6 10.34/122.7/62.1 12.34/122.6/61.5 14.40/122.4/61.0 16.38/122.2/60.4
snow 10.63/134.1/65.6 23.59/147.1/65.5 25.03/148.5/65.8 36.71/160.2/65.1 51.44/174.9/62.8
frost 30.79/154.3/62.5 44.41/167.9/60.4 48.35/171.8/57.2 44.69/167.7/54.8 42.82/164.3/52.1
fog 10.97/122.3/54.3 21.63/121.7/45.6 27.80/122.1/41.8 32.32/121.3/40.5 39.17/121.3/39.7
brightness 10.02/133.5/65.2 20.23/143.7/65.0 29.98/153.5/64.4 39.17/162.7/63.4 55.54/179.0/60.5
contrast 10.80/123.0/54.0 21.59/123.0/44.7 25.91/123.0/41.7 30.23/123.0/39.1 36.71/123.0/36.5
elastic_transform 21.58/123.0/63.3 19.73/122.7/63.1 18.08/123.1/62.6 16.54/123.0/62.3 13.55/123.0/62.3
pixelate 1.80/123.6/64.5 3.38/123.6/64.3 4.16/123.6/64.1 6.22/123.7/63.7 8.62/123.9/63.2
jpeg_compression 5.30/123.5/64.5 6.56/123.5/64.4 7.00/123.5/64.4 7.46/123.5/64.3 8.07/123.5/64.2
speckle_noise 5.75/122.8/65.0 9.43/122.6/65.3 11.25/122.4/65.6 14.83/122.0/66.4 18.33/121.6/67.3
gaussian_blur 1.34/123.0/64.1 4.91/123.0/62.3 6.27/123.0/61.7 7.44/123.0/61.1 9.46/123.0/59.9
spatter 1.02/124.5/65.1 2.72/126.2/65.6 6.69/130.2/66.2 3.15/120.5/65.1 5.19/118.6/65.2
saturate 11.45/134.9/62.8 14.79/138.3/63.1 7.98/115.5/68.1 20.35/103.1/69.6 29.78/93.7/70.6
"""
"""On the first 500 test images, severities 1 to 5: the same three."""


def rows(table):
    return [(name, cells) for name, *cells in map(str.split, table.strip().splitlines())]


def real(name):
    path = Path(os.environ.get("PATHPROX_DATA", "")) / name
    if "PATHPROX_DATA" not in os.environ or not path.exists():
        pytest.skip(f"set PATHPROX_DATA to a folder with {name}")
    return path


def assert_has_statistics(corrupt, images, cell, rel=0.03):
    """Within what is printed, or, where there are draws, near it: the mean of several seeds against one of theirs."""
    outs = [corrupt(images, random(seed)).astype(float) for seed in range(4)]
    found = np.mean([(abs(out - images).mean(), out.mean(), out.std()) for out in outs], axis=0)
    drawn = (outs[0] != outs[1]).any()
    for value, printed in zip(found, cell.split("/"), strict=True):
        digit = 10.0 ** -len(printed.split(".")[1])
        assert value == pytest.approx(float(printed), abs=max(0.01, digit / 2 + 1e-3), rel=rel if drawn else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), rows(MNIST_STATISTICS))
def test_corrupted_digits_have_the_statistics_of_the_published_program(name, cells):
    with gzip.open(real("mnist/t10k-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(16 + 1000 * 784), np.uint8, offset=16).reshape(-1, 28, 28)
    few_and_large = name in ("fog", "spatter")  # so that 1000 digits still differ by two percent from seed to seed
    assert_has_statistics(MNIST_C[name], images, cells[0], rel=0.05 if few_and_large else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), rows(CIFAR_STATISTICS))
def test_corrupted_photos_have_the_statistics_of_the_published_program(name, cells):
    records = np.fromfile(real("cifar-10-batches-bin/test_batch.bin"), np.uint8, 500 * 3073).reshape(500, 3073)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    corrupt = ALL_CIFAR[name]
    if name == "frost":
        corrupt = partial(corrupt, pictures=weather.frost_pictures(real("frost")))
    for severity, cell in zip(SEVERITIES, cells, strict=True):
        assert_has_statistics(lambda x, generator, s=severity: corrupt(x, severity=s, random=generator), images, cell)
