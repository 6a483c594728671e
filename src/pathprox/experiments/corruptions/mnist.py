"""The fifteen corruptions of MNIST-C (Mu and Gilmer, 2019) at the strength of the published set.

Each takes digits ``(n, 28, 28)`` of bytes and a random generator, and returns digits of the same shape. The published
set was made without a seed: the random ones agree with it in distribution, not in the draws.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from skimage.feature import canny

from pathprox.experiments.corruptions.blocks import (
    Floats,
    Images,
    blobs,
    clamp,
    gaussian,
    glass_moves,
    motion_blur,
    plasma,
    sample,
    unit,
)

SIDE = 28
FOG_MAP = 256
"""The fog of MNIST-C is the corner of a much larger cloud, and therefore smooth."""
FOG_BATCH = 50
"""So many of the large clouds fit into the processor's memory at once."""
LINE_WIDTH = 2.3


def _bytes(x: Floats) -> Images:
    """Rounded to the nearest, as the published set was stored."""
    return np.round(x.clip(0, 1) * 255).astype(np.uint8)


def _signs(count: int, random: np.random.Generator) -> Floats:
    return random.choice([-1.0, 1.0], count)


def shot_noise(images: Images, random: np.random.Generator) -> Images:
    """So little light that three photons make white."""
    return _bytes(random.poisson(unit(images) * 3) / 3)


def impulse_noise(images: Images, random: np.random.Generator) -> Images:
    """One pixel in six is black or white."""
    lot = random.random(images.shape)
    return np.where(lot < 0.17, np.where(lot < 0.085, 0, 255), images).astype(np.uint8)


def glass_blur(images: Images, random: np.random.Generator) -> Images:
    """Pixels swapped with their neighbours, between two blurs.

    The blur goes along columns only: the published set was made by a call that took the columns of a grey image for
    its colours.
    """

    def blur(x: Floats) -> Floats:
        return gaussian(x, 0.7, axes=(1,))

    pixels = np.moveaxis((blur(unit(images)) * 255).astype(np.uint8), 0, -1).copy()
    number = np.arange(len(images))
    for r, c, rows, cols in glass_moves(len(images), SIDE, 2, random):
        moved = random.random(len(images)) < 0.5
        rows, cols = np.where(moved, rows, r), np.where(moved, cols, c)
        here = pixels[r, c].copy()
        pixels[r, c] = pixels[rows, cols, number]
        pixels[rows, cols, number] = here
    return _bytes(blur(unit(np.moveaxis(pixels, -1, 0))))


def trail(images: Images, random: np.random.Generator) -> Images:
    """The camera moved, up to 45 degrees from the horizontal."""
    return motion_blur(images, 10, 3, random.uniform(-45, 45, len(images)))


def _warp(images: Images, matrices: Floats) -> Images:
    """``matrices`` (n, 2, 2) take a place (column, row) in the result to its place in the digit; the centre stays.

    The ring of zeros stands for everything outside.
    """
    centre = (SIDE - 1) / 2
    y, x = np.mgrid[:SIDE, :SIDE] - centre
    col, row = (matrices[:, i, 0, None, None] * x + matrices[:, i, 1, None, None] * y + centre for i in (0, 1))
    ringed = np.pad(unit(images), [(0, 0), (1, 1), (1, 1)])
    return _bytes(sample(ringed, row + 1, col + 1, clamp))


def shear(images: Images, random: np.random.Generator) -> Images:
    """Sheared by 0.4 radians to either side.

    The matrix is that of scikit-image in 2019, which also stretches the digit; today's has a tangent instead.
    """
    angle = 0.4 * _signs(len(images), random)
    one, zero = np.ones_like(angle), np.zeros_like(angle)
    return _warp(images, np.stack([one, -np.sin(angle), zero, np.cos(angle)], -1).reshape(-1, 2, 2))


def scale(images: Images, random: np.random.Generator) -> Images:
    """Shrunk to 70 %."""
    return _warp(images, np.broadcast_to(np.eye(2) / 0.7, (len(images), 2, 2)))


def rotate(images: Images, random: np.random.Generator) -> Images:
    """Turned by 0.4 radians to either side."""
    angle = 0.4 * _signs(len(images), random)
    cos, sin = np.cos(angle), np.sin(angle)
    return _warp(images, np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2))


def brightness(images: Images, random: np.random.Generator) -> Images:
    """Half of the range brighter."""
    return _bytes(unit(images) + 0.5)


def translate(images: Images, random: np.random.Generator) -> Images:
    """Three pixels along each axis, to either side."""
    ringed = np.pad(images, [(0, 0), (3, 3), (3, 3)])
    rows, cols = (3 + 3 * random.choice([-1, 1], len(images))[:, None] + np.arange(SIDE) for _ in range(2))
    return ringed[np.arange(len(images))[:, None, None], rows[:, :, None], cols[:, None, :]]


def stripe(images: Images, random: np.random.Generator) -> Images:
    """The left and the right quarter inverted."""
    outer = np.arange(SIDE) // 7 % 3 == 0
    return np.where(outer, 255 - images, images)


def fog(images: Images, random: np.random.Generator) -> Images:
    """Thick fog that leaves the brightest pixel about as bright as it was."""
    counts = [len(images[start : start + FOG_BATCH]) for start in range(0, len(images), FOG_BATCH)]
    clouds = np.concatenate([plasma(count, FOG_MAP, 1.4, random)[:, :SIDE, :SIDE].copy() for count in counts])
    x = unit(images)
    brightest = x.max((1, 2), keepdims=True)
    return _bytes((x + 3 * clouds) * brightest / (brightest + 3))


def spatter(images: Images, random: np.random.Generator) -> Images:
    """Dark grey mud."""
    mask = blobs(gaussian(random.normal(0.65, 0.3, images.shape), 1), 0.65, 1.5)
    return _bytes(unit(images) * (1 - mask) + 63 / 255 * mask)


def _line(start: tuple[Floats, Floats], end: tuple[Floats, Floats]) -> Floats:
    """One soft line for each image, from one (column, row) to another further right."""
    (c0, r0), (c1, r1) = ((c[:, None, None], r[:, None, None]) for c, r in (start, end))
    row, col = np.mgrid[:SIDE, :SIDE]
    distance = np.abs(row - r0 - (col - c0) * (r1 - r0) / (c1 - c0)).clip(0, LINE_WIDTH - 1e-10)
    value = (1 + np.log(1 - distance / LINE_WIDTH)).clip(0, 1)
    return np.where((col >= np.floor(c0)) & (col < np.ceil(c1)), value, 0)


def dotted_line(images: Images, random: np.random.Generator) -> Images:
    """A line from the left border to the right one, two columns drawn and two left out."""
    first, last = random.integers(0, 27, (2, len(images))).astype(np.float64)
    edge = np.zeros(len(images))
    drawn = np.arange(SIDE) % 4 >= 2
    return _bytes(unit(images) + drawn * _line((edge, first), (edge + 27, last)))


def zigzag(images: Images, random: np.random.Generator) -> Images:
    """A zigzag from column 2 to column 25 around a line that leans by at most five pixels.

    It leans so little that every image has six teeth and a stub, whose height is an oddity of the published set.
    """
    width, period, height = 23, 4, 2.0
    start = random.integers(0, 27, len(images)).astype(np.float64)
    lean = np.arctan(random.integers(-5, 5, len(images)) / width)
    length = width / np.cos(lean)
    teeth = [(np.full(len(images), period * i + period / 2), height * (-1) ** i) for i in range(6)]
    stub = (length, teeth[-1][1] / (2 * (length - 20)))
    corners = [
        (2 + along * np.cos(lean) - above * np.sin(lean), start + along * np.sin(lean) + above * np.cos(lean))
        for along, above in [(np.zeros(len(images)), 0.0), *teeth, stub]
    ]
    x = unit(images)
    for i in range(len(corners) - 1):
        x = (x + _line(corners[i], corners[i + 1])).clip(0, 1)
    return _bytes(x)


def canny_edges(images: Images, random: np.random.Generator) -> Images:
    """Only the outline, white on black."""
    return np.stack([canny(digit) for digit in unit(images)]).astype(np.uint8) * np.uint8(255)


MNIST_C: dict[str, Callable[[Images, np.random.Generator], Images]] = {
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "glass_blur": glass_blur,
    "motion_blur": trail,
    "shear": shear,
    "scale": scale,
    "rotate": rotate,
    "brightness": brightness,
    "translate": translate,
    "stripe": stripe,
    "fog": fog,
    "spatter": spatter,
    "dotted_line": dotted_line,
    "zigzag": zigzag,
    "canny_edges": canny_edges,
}
"""In the order of the published list."""
