"""Drops of water for the extra corruption `spatter`: OpenCV's operators on a batch of byte images, without OpenCV."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage  # type: ignore[import-untyped]

from pathprox.experiments.corruptions.blocks import Floats, Images, Integers, correlate, numbers

LOW, HIGH = 50, 150
TAN_22 = 0.41421356
FARTHEST = 20.0
KNIGHT_COSTS = {(0, 1): 1.0, (1, 1): 1.4, (1, 2): 2.1969}
"""What a step of OpenCV's distance transform costs: straight, diagonal, and the knight's move of chess."""
EMBOSS = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])


def drops(layer: Images) -> Floats:
    """The relief of the drops in ``layer``, from 0 to 1 in each image; 0 everywhere where there is no drop."""
    depth = box_blur(distance(edges(layer))).astype(np.uint8)
    relief = correlate(equalize(depth).astype(np.float64), EMBOSS).clip(0, 255)
    lit = layer * np.round(box_blur(relief))
    highest = lit.max((1, 2), keepdims=True)
    return lit / np.where(highest > 0, highest, 1)


def box_blur(x: Floats) -> Floats:
    """The mean of three by three pixels."""
    return correlate(x, np.ones((3, 3))) / 9


def edges(images: Images) -> npt.NDArray[np.bool_]:
    """OpenCV's Canny with gradients added as absolute values: crests above ``LOW`` that touch one above ``HIGH``."""
    x = images.astype(np.int64)
    right, down = _slope(x, 2, 1), _slope(x, 1, 2)
    strength = abs(right) + abs(down)
    crest = _is_crest(strength, right, down) & (strength > LOW)
    return ndimage.binary_propagation(crest & (strength > HIGH), structure=np.ones((1, 3, 3)), mask=crest)


def _slope(x: Integers, along: int, across: int) -> Integers:
    difference = ndimage.correlate1d(x, [-1, 0, 1], axis=along, mode="nearest")
    return ndimage.correlate1d(difference, [1, 2, 1], axis=across, mode="nearest")


def _is_crest(strength: Integers, right: Integers, down: Integers) -> npt.NDArray[np.bool_]:
    """Whether a pixel is stronger than its two neighbours across the edge; of two equal ones the second counts."""
    ringed = np.pad(strength, [(0, 0), (1, 1), (1, 1)])
    height, width = strength.shape[1:]

    def near(r: int, c: int) -> Integers:
        return ringed[:, 1 + r : 1 + r + height, 1 + c : 1 + c + width]

    flat = abs(down) < TAN_22 * abs(right)
    steep = abs(down) > (TAN_22 + 2) * abs(right)
    rising = (right ^ down) < 0
    return np.select(
        [flat, steep, rising],
        [
            (strength > near(0, -1)) & (strength >= near(0, 1)),
            (strength > near(-1, 0)) & (strength >= near(1, 0)),
            (strength > near(-1, 1)) & (strength > near(1, -1)),
        ],
        (strength > near(-1, -1)) & (strength > near(1, 1)),
    )


def distance(marked: npt.NDArray[np.bool_]) -> Floats:
    """How far each pixel is from a marked one, by king's and knight's moves, at most ``FARTHEST``."""
    reach = np.where(marked, 0, FARTHEST)
    moves = [
        (r, c, KNIGHT_COSTS[min(abs(r), abs(c)), max(abs(r), abs(c))])
        for r in range(-2, 3)
        for c in range(-2, 3)
        if (min(abs(r), abs(c)), max(abs(r), abs(c))) in KNIGHT_COSTS
    ]
    height, width = reach.shape[1:]
    while True:
        ringed = np.pad(reach, [(0, 0), (2, 2), (2, 2)], constant_values=FARTHEST)
        nearer = reach
        for r, c, cost in moves:
            nearer = np.minimum(nearer, ringed[:, 2 + r : 2 + r + height, 2 + c : 2 + c + width] + cost)
        if (nearer == reach).all():
            return reach
        reach = nearer


def equalize(images: Images) -> Images:
    """Histogram equalisation: the darkest level becomes 0, the brightest 255; an image of one level stays."""
    count, pixels = len(images), images[0].size
    levels = images.astype(np.int64) + 256 * numbers(images)
    histogram = np.bincount(levels.ravel(), minlength=256 * count).reshape(count, 256)
    below = histogram.cumsum(1)
    first = np.take_along_axis(histogram, (histogram > 0).argmax(1)[:, None], 1)
    table = np.round((below - first) * 255 / np.maximum(pixels - first, 1)).clip(0, 255)
    table = np.where(first == pixels, np.arange(256), table)
    return table.ravel()[levels].astype(np.uint8)
