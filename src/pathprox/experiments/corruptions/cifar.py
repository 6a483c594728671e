"""The fifteen corruptions of CIFAR-10-C (Hendrycks and Dietterich, 2019) and the four extra ones, severities 1 to 5.

Each takes images ``(n, 32, 32, 3)`` of bytes, the severity and a random generator, and returns images of the same
shape. The published set was made without a seed: the random ones agree with it in distribution, not in the draws.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
from PIL import Image
from skimage.color import hsv2rgb, rgb2hsv

from pathprox.experiments.corruptions.blocks import (
    Floats,
    Images,
    clipped_zoom,
    correlate,
    gaussian,
    glass_moves,
    mirror,
    motion_blur,
    reflect,
    sample,
    unit,
)
from pathprox.experiments.corruptions.severity import at, to_bytes
from pathprox.experiments.corruptions.weather import fog, frost, snow, spatter

SIDE = 32


def gaussian_noise(images: Images, severity: int, random: np.random.Generator) -> Images:
    """The noise of a sensor in the dark."""
    return to_bytes(unit(images) + random.normal(0, at(severity, 0.04, 0.06, 0.08, 0.09, 0.1), images.shape))


def shot_noise(images: Images, severity: int, random: np.random.Generator) -> Images:
    """The noise of few photons."""
    photons = at(severity, 500, 250, 100, 75, 50)
    return to_bytes(random.poisson(unit(images) * photons) / photons)


def impulse_noise(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Single values, each channel by itself, become black or white."""
    amount = at(severity, 0.01, 0.02, 0.03, 0.05, 0.07)
    lot = random.random(images.shape)
    return np.where(lot < amount, np.where(lot < amount / 2, 0, 255), images).astype(np.uint8)


def speckle_noise(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Noise in proportion to the brightness."""
    x = unit(images)
    return to_bytes(x + x * random.normal(0, at(severity, 0.06, 0.1, 0.12, 0.16, 0.2), images.shape))


def gaussian_blur(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Blurred softly."""
    return to_bytes(gaussian(unit(images), at(severity, 0.4, 0.6, 0.7, 0.8, 1.0)))


def disk(radius: float, sigma: float) -> Floats:
    """A disk with a soft rim, in single precision as it was published: its sum decides how an even surface is cut."""
    grid = np.arange(-8, 9)
    hard = (grid**2 + grid[:, None] ** 2 <= radius**2).astype(np.float32)
    hard /= hard.sum()
    rim = np.exp(-0.5 / sigma**2)
    weights = (np.array([rim, 1, rim]) / (1 + 2 * rim)).astype(np.float32)
    return correlate(hard[None], np.outer(weights, weights))[0]


def defocus_blur(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Out of focus: every point becomes a disk."""
    radius, sigma = at(severity, (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    return to_bytes(correlate(unit(images), disk(radius, sigma)))


def glass_blur(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Seen through frosted glass.

    A pixel is overwritten by a neighbour and never given back: the published code meant to swap, but exchanged two
    views of the same array.
    """
    sigma, passes = at(severity, (0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
    pixels = np.moveaxis((gaussian(unit(images), sigma) * 255).astype(np.uint8), 0, 2).copy()
    number = np.arange(len(images))
    for r, c, rows, cols in glass_moves(len(images), SIDE, passes, random):
        pixels[r, c] = pixels[rows, cols, number]
    return to_bytes(gaussian(unit(np.moveaxis(pixels, 2, 0)), sigma))


def trail(images: Images, severity: int, random: np.random.Generator) -> Images:
    """The camera moved, up to 45 degrees from the horizontal."""
    radius, sigma = at(severity, (6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    return motion_blur(images, radius, sigma, random.uniform(-45, 45, len(images)))


def zoom_blur(images: Images, severity: int, random: np.random.Generator) -> Images:
    """The camera moved towards the object; in single precision, as it was published."""
    factors = np.arange(1, at(severity, 1.06, 1.11, 1.16, 1.21, 1.26), 0.01)
    x = unit(images).astype(np.float32)
    total = np.zeros_like(x)
    for factor in factors:
        total += clipped_zoom(x, float(factor)).astype(np.float32)
    return to_bytes((x + total) / (len(factors) + 1))


def brightness(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Daylight."""
    hsv = rgb2hsv(unit(images))
    hsv[..., 2] = (hsv[..., 2] + at(severity, 0.05, 0.1, 0.15, 0.2, 0.3)).clip(0, 1)
    return to_bytes(hsv2rgb(hsv))


def saturate(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Colours washed out (severities 1 and 2) or too strong."""
    factor, offset = at(severity, (0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
    hsv = rgb2hsv(unit(images))
    hsv[..., 1] = (hsv[..., 1] * factor + offset).clip(0, 1)
    return to_bytes(hsv2rgb(hsv))


def contrast(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Everything nearer to the mean of its channel."""
    x = unit(images)
    mean = x.mean((1, 2), keepdims=True)
    return to_bytes((x - mean) * at(severity, 0.75, 0.5, 0.4, 0.3, 0.15) + mean)


def elastic_transform(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Stretched as a whole, then bent in small places.

    Severity 1 only stretches, and stretches most: by mean change it is the strongest of the five.
    """
    gain, sigma, jitter = at(
        severity, (0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)
    )
    x = _stretch(unit(images), jitter, random)
    right, down = (
        gain * gaussian(random.uniform(-1, 1, images.shape[:3]), sigma, mode="reflect", truncate=3) for _ in range(2)
    )
    row, col = np.mgrid[:SIDE, :SIDE]
    return to_bytes(sample(x, row + down, col + right, reflect))


def _stretch(x: Floats, jitter: float, random: np.random.Generator) -> Floats:
    """The affine map that moves three points by up to ``jitter`` pixels.

    OpenCV, with which the set was made, knows positions to a 32nd of a pixel.
    """
    points = np.array([[26.0, 26], [26, 6], [6, 6]])
    moved = points + random.uniform(-jitter, jitter, (len(x), 3, 2))
    back = np.linalg.solve(np.concatenate([moved, np.ones((len(x), 3, 1))], -1), points)
    row, col = np.mgrid[:SIDE, :SIDE]
    across, down, start = (back[:, i, :, None, None] for i in range(3))
    source = np.round((across * col + down * row + start) * 32) / 32
    return sample(x, source[:, 1], source[:, 0], mirror)


def pixelate(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Shrunk and enlarged again."""
    side = int(SIDE * at(severity, 0.95, 0.9, 0.85, 0.75, 0.65))
    box = Image.Resampling.BOX
    small = (Image.fromarray(image).resize((side, side), box) for image in images)
    return np.stack([np.asarray(image.resize((SIDE, SIDE), box)) for image in small])


def jpeg_compression(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Stored as JPEG of low quality."""
    quality = at(severity, 80, 65, 58, 50, 40)

    def stored(image: Images) -> Images:
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer))

    return np.stack([stored(image) for image in images])


CIFAR10_C: dict[str, Callable[[Images, int, np.random.Generator], Images]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": trail,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
"""In the order of the published list."""

CIFAR10_C_EXTRA: dict[str, Callable[[Images, int, np.random.Generator], Images]] = {
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "spatter": spatter,
    "saturate": saturate,
}
"""Published beside the fifteen, for choosing settings without looking at the benchmark."""
