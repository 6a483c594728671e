"""The building blocks of corruptions, against slow twins."""

import numpy as np
import pytest

from corrupting import blank, random
from pathprox.experiments.corruptions import (
    blocks,
    water,
)


def test_motion_blur_agrees_with_its_definition():
    images, radius, sigma = random().integers(0, 256, (3, 9, 9), dtype=np.uint8), 3, 2.0
    degrees = np.array([-45.0, 20.0, -100.0])
    weights = np.exp(-(np.arange(7) ** 2) / (2 * sigma**2))
    expected = np.zeros(images.shape)
    for n, t in enumerate(np.deg2rad(degrees)):
        for r in range(9):
            for c in range(9):
                for i, weight in enumerate(weights / weights.sum()):
                    row, col = r + int(np.ceil(i * np.sin(t) - 0.5)), c + int(np.ceil(i * np.cos(t) - 0.5))
                    expected[n, r, c] += weight * images[n, min(max(row, 0), 8), min(max(col, 0), 8)]
    np.testing.assert_array_equal(blocks.motion_blur(images, radius, sigma, degrees), np.floor(expected + 1e-6))


def slow_plasma(side, decay, generator):
    heights, step, wobble = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half, cells = step // 2, side // step
        jitter = wobble * generator.uniform(-wobble, wobble, (3, 1, cells, cells))[:, 0]
        grid = [(r, c) for r in range(0, side, step) for c in range(0, side, step)]

        def at(r, c):
            return heights[r % side, c % side]

        def around(r, c, far, pairs, heights=heights, at=at):
            return sum(at(r + far * i, c + far * j) for i, j in pairs) / 4

        straight, diagonal = [(0, 1), (0, -1), (1, 0), (-1, 0)], [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        for kind, (down, right, pairs) in enumerate([(half, half, diagonal), (0, half, straight), (half, 0, straight)]):
            for r, c in grid:
                wave = jitter[kind, r // step, c // step]
                heights[r + down, c + right] = around(r + down, c + right, half, pairs) + wave
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return heights / heights.max()


def test_plasma_agrees_with_its_definition():
    np.testing.assert_allclose(blocks.plasma(1, 16, 1.7, random())[0], slow_plasma(16, 1.7, random()), atol=1e-12)


def test_plasma_makes_a_map_from_0_to_1_for_each_image():
    clouds = blocks.plasma(5, 32, 2, random())
    assert (clouds.min((1, 2)) == 0).all()
    assert (clouds.max((1, 2)) == 1).all()
    assert not np.allclose(clouds[0], clouds[1])


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.25, float(np.arange(1, 1.26, 0.01)[25]), 2.25])
def test_clipped_zoom_agrees_with_scipy(factor):
    from scipy.ndimage import zoom

    images = random().random((2, 32, 32, 3))
    crop = int(np.ceil(32 / factor))
    start = (32 - crop) // 2
    middle = images[:, start : start + crop, start : start + crop]
    large = np.stack([zoom(image, (factor, factor, 1), order=1) for image in middle])
    trim = (large.shape[1] - 32) // 2
    expected = large[:, trim : trim + 32, trim : trim + 32]
    np.testing.assert_allclose(blocks.clipped_zoom(images, factor), expected, atol=1e-12)
    np.testing.assert_allclose(blocks.clipped_zoom(images[..., 0], factor), expected[..., 0], atol=1e-12)


@pytest.mark.parametrize(
    ("fold", "mode"), [(blocks.mirror, "mirror"), (blocks.reflect, "reflect"), (blocks.clamp, "nearest")]
)
def test_sampling_agrees_with_scipy(fold, mode):
    from scipy.ndimage import map_coordinates

    images, (rows, cols) = random().random((3, 9, 9)), random(1).uniform(-20, 30, (2, 3, 9, 9))
    found = blocks.sample(images, rows, cols, fold)
    for image, row, col, out in zip(images, rows, cols, found, strict=True):
        np.testing.assert_allclose(out, map_coordinates(image, [row, col], order=1, mode=mode), atol=1e-12)


def test_correlation_agrees_with_scipy():
    from scipy.ndimage import correlate

    images, kernel = random().random((2, 9, 9, 3)), random().random((5, 5))
    np.testing.assert_allclose(
        blocks.correlate(images, kernel), correlate(images, kernel[None, :, :, None], mode="mirror"), atol=1e-12
    )


def test_distance_is_the_shortest_way_by_the_moves_of_king_and_knight():
    marked = np.zeros((1, 32, 32), bool)
    marked[0, 3, 4] = True
    row, col = abs(np.mgrid[:32, :32] - np.array([3, 4])[:, None, None])
    long, short = np.maximum(row, col), np.minimum(row, col)
    by_knight = 2.1969 * short + (long - 2 * short)
    by_king = 2.1969 * (long - short) + 1.4 * (2 * short - long)
    expected = np.minimum(np.where(2 * short <= long, by_knight, by_king), 20)
    np.testing.assert_allclose(water.distance(marked)[0], expected, atol=1e-9)


def test_equalizing_spreads_the_levels_over_the_range():
    image = np.array([[[3, 3, 5, 5], [5, 5, 9, 9]]], np.uint8)
    np.testing.assert_array_equal(water.equalize(image), [[[0, 0, 170, 170], [170, 170, 255, 255]]])
    np.testing.assert_array_equal(water.equalize(blank(7, side=28)), blank(7, side=28))


def test_without_a_drop_the_photo_stays_dry():
    assert not water.drops(blank(side=28)).any()
