"""What the corruptions of both sets are built from: filters, warps and random maps, for a whole batch at once.

The published sets were made one image at a time with OpenCV, scikit-image and ImageMagick. These functions do the same
arithmetic on arrays ``(n, rows, columns)`` or ``(n, rows, columns, channels)``, so that a set is made in minutes and
without those libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from scipy import ndimage  # type: ignore[import-untyped]

Images = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]
Fold = Callable[[Integers, int], Integers]
"""Says which pixel stands in for one outside the image: (index, side) -> an index inside."""


def unit(images: Images) -> Floats:
    """The images on the scale from 0 to 1."""
    return images / 255.0


def numbers(images: Floats | Images) -> Integers:
    """The number of each image, shaped to be broadcast against rows and columns."""
    return np.arange(len(images))[:, None, None]


def beside(values: Floats, like: Floats | Images) -> Floats:
    """``values`` with trailing dimensions of size 1, so that they spread over the pixels and channels of ``like``."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def clamp(index: Integers, side: int) -> Integers:
    """The border is repeated: a a a | a b c."""
    return index.clip(0, side - 1)


def mirror(index: Integers, side: int) -> Integers:
    """Mirrored at the last pixel, which is not repeated: c b | a b c."""
    index = index % (2 * side - 2)
    return np.minimum(index, 2 * side - 2 - index)


def reflect(index: Integers, side: int) -> Integers:
    """Mirrored at the edge of the last pixel, which is repeated: b a | a b c."""
    index = index % (2 * side)
    return np.minimum(index, 2 * side - 1 - index)


def gaussian(
    x: Floats, sigma: float, *, axes: tuple[int, ...] = (1, 2), mode: str = "nearest", truncate: float = 4.0
) -> Floats:
    """Every image blurred by itself; the defaults are those of scikit-image's filter."""
    return ndimage.gaussian_filter(x, sigma, axes=axes, mode=mode, truncate=truncate)


def correlate(x: Floats, kernel: Floats) -> Floats:
    """Every image correlated with a square kernel of odd side, mirrored at the border as OpenCV does it.

    Only what is not 0 in the kernel costs time: the kernels here are large and nearly empty.
    """
    height, width, reach = x.shape[1], x.shape[2], len(kernel) // 2
    padded = np.pad(x, [(0, 0), (reach, reach), (reach, reach), *[(0, 0)] * (x.ndim - 3)], mode="reflect")
    total = np.zeros_like(x)
    for r, c in np.argwhere(kernel):
        total += kernel[r, c] * padded[:, r : r + height, c : c + width]
    return total


def sample(x: Floats, rows: Floats, cols: Floats, fold: Fold) -> Floats:
    """Each image read at its own fractional positions ``(n, rows, columns)``, bilinearly."""
    top, left = np.floor(rows).astype(np.int64), np.floor(cols).astype(np.int64)
    down, right = beside(rows - top, x), beside(cols - left, x)
    number, height, width = numbers(x), x.shape[1], x.shape[2]
    above, below = fold(top, height), fold(top + 1, height)
    here, there = fold(left, width), fold(left + 1, width)
    upper = x[number, above, here] * (1 - right) + x[number, above, there] * right
    lower = x[number, below, here] * (1 - right) + x[number, below, there] * right
    return upper * (1 - down) + lower * down


def motion_blur(images: Images, radius: float, sigma: float, degrees: Floats) -> Images:
    """ImageMagick's motion blur: a one-sided trail with Gaussian weights, at each image's own angle.

    ImageMagick cuts the fraction off. The small number keeps an even surface even, whose weights add up to one only
    within rounding.
    """
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angle = np.deg2rad(degrees)[:, None]
    height, width = images.shape[1:3]
    total = np.full(images.shape, 1e-6)
    for step, weight in zip(steps, weights, strict=True):
        down, right = (np.ceil(step * part - 0.5).astype(np.int64) for part in (np.sin(angle), np.cos(angle)))
        rows, cols = clamp(np.arange(height) + down, height), clamp(np.arange(width) + right, width)
        total += weight * images[numbers(images), rows[:, :, None], cols[:, None, :]]
    return total.astype(np.uint8)


def clipped_zoom(x: Floats, factor: float) -> Floats:
    """The middle of each square image enlarged to the size of the whole, linearly.

    The sizes hang on the last bits of the factor (26 * 1.25 and 26 * 1.2500000000000002 round differently), so the
    caller has to pass the very number the published set was made with.
    """
    side = x.shape[1]
    crop = int(np.ceil(side / factor))
    large = round(crop * factor)
    position = (np.arange(side) + (large - side) // 2) * ((crop - 1) / (large - 1))
    low = np.floor(position).astype(np.int64).clip(0, crop - 2)
    weight = position - low
    low += (side - crop) // 2
    for axis in (1, 2):
        share = beside(weight, x[0] if axis == 1 else x[0, 0])
        x = x.take(low, axis) * (1 - share) + x.take(low + 1, axis) * share
    return x


def plasma(count: int, side: int, decay: float, random: np.random.Generator) -> Floats:
    """Random clouds between 0 and 1 by the diamond-square method on a torus whose side is a power of two.

    The wobble enters squared (the number times a uniform of the same size): that is how the published fog was made.
    """
    heights = np.zeros((count, side, side))
    step, wobble = side, 100.0
    while step >= 2:
        half, cells = step // 2, (count, side // step, side // step)
        jitter = wobble * random.uniform(-wobble, wobble, (3, *cells))
        corners = heights[:, ::step, ::step]
        across, down = corners + np.roll(corners, -1, 2), corners + np.roll(corners, -1, 1)
        centres = (across + np.roll(across, -1, 1)) / 4 + jitter[0]
        heights[:, half::step, half::step] = centres
        heights[:, ::step, half::step] = (across + centres + np.roll(centres, 1, 1)) / 4 + jitter[1]
        heights[:, half::step, ::step] = (down + centres + np.roll(centres, 1, 2)) / 4 + jitter[2]
        step, wobble = half, wobble / decay
    heights -= heights.min((1, 2), keepdims=True)
    heights /= heights.max((1, 2), keepdims=True)
    return heights


def glass_moves(
    count: int, side: int, passes: int, random: np.random.Generator
) -> Iterator[tuple[int, int, Integers, Integers]]:
    """The walk of glass blur: each pixel from the last to the third, and the near pixel each image draws for it.

    Every step sees what the steps before it did, so this walk cannot be vectorised over pixels, only over images.
    """
    for _ in range(passes):
        shift = random.integers(-1, 1, (side, side, 2, count))
        for r in range(side - 1, 1, -1):
            for c in range(side - 1, 1, -1):
                yield r, c, r + shift[r, c, 0], c + shift[r, c, 1]


def blobs(x: Floats, threshold: float, sigma: float) -> Floats:
    """Where mud sticks, from 0 to 1: what is above the threshold, blurred, without its thin rim."""
    mask = gaussian((x > threshold).astype(np.float64), sigma)
    return np.where(mask < 0.8, 0, mask)
