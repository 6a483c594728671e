"""Snow, frost, fog and spatter of CIFAR-10-C."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from pathprox.experiments.corruptions.blocks import (
    Floats,
    Images,
    blobs,
    clipped_zoom,
    gaussian,
    motion_blur,
    plasma,
    unit,
)
from pathprox.experiments.corruptions.severity import at, to_bytes
from pathprox.experiments.corruptions.water import drops

FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""There is a sixth picture, but the published set never drew it."""
GREY = np.array([0.299, 0.587, 0.114])
WATER, MUD = np.array([175, 238, 238]) / 255, np.array([63, 42, 20]) / 255


def _normal_layer(images: Images, mean: float, spread: float, random: np.random.Generator) -> Floats:
    return random.normal(mean, spread, images.shape[:3])


def snow(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Flakes driven by the wind, on an image that is whitened."""
    mean, spread, zoom, threshold, radius, sigma, mix = at(
        severity,
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )
    layer = clipped_zoom(_normal_layer(images, mean, spread, random), zoom)
    flakes = to_bytes(np.where(layer < threshold, 0, layer))
    flakes = motion_blur(flakes, radius, sigma, random.uniform(-135, -45, len(images)))
    x = unit(images)
    whitened = mix * x + (1 - mix) * np.maximum(x, 1.5 * (x * GREY).sum(-1, keepdims=True) + 0.5)
    fall = unit(flakes) + unit(flakes[:, ::-1, ::-1])
    return to_bytes(whitened + fall[..., None])


def find_frost(folder: Path | None = None) -> Path:
    """Where the pictures are: the folder given, or else what the package `imagecorruptions` brings along.

    That package is not imported, because it does not work with today's libraries; its pictures do.
    """
    if folder is None:
        spec = find_spec("imagecorruptions")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                f"the pictures {FROST_FILES[0]} .. {FROST_FILES[-1]} are not here: give the folder they are in, "
                "or install them with `pip install --no-deps imagecorruptions`"
            )
        folder = Path(spec.origin).parent / "frost"
    absent = [name for name in FROST_FILES if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}: they come with the package imagecorruptions")
    return folder


@lru_cache(maxsize=2)
def frost_pictures(folder: Path) -> tuple[Images, ...]:
    """The five pictures shrunk to a fifth.

    Shrinking by five without smoothing means to take the middle one of every five pixels.
    """
    pictures = []
    for name in FROST_FILES:
        with Image.open(folder / name) as picture:
            pictures.append(np.asarray(picture.convert("RGB"))[2::5, 2::5].copy())
    return tuple(pictures)


def frost(
    images: Images, severity: int, random: np.random.Generator, pictures: Sequence[Images] | None = None
) -> Images:
    """A piece of a picture of ice laid over the image; ``pictures`` default to those that are installed."""
    image_weight, ice_weight = at(severity, (1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
    pictures = frost_pictures(find_frost()) if pictures is None else pictures
    choice = random.integers(0, len(pictures), len(images))
    ice = np.empty_like(images)
    for number, picture in enumerate(pictures):
        chosen = choice == number
        pieces = sliding_window_view(picture, images.shape[1:3], axis=(0, 1))
        # the last row and column of pieces were out of reach of the published draw
        r, c = (random.integers(0, places - 1, chosen.sum()) for places in pieces.shape[:2])
        ice[chosen] = np.moveaxis(pieces[r, c], 1, -1)
    return (image_weight * images + ice_weight * ice).clip(0, 255).astype(np.uint8)


def fog(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Clouds that leave the brightest value about as bright as it was."""
    amount, decay = at(severity, (0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
    clouds = plasma(len(images), images.shape[1], decay, random)[..., None]
    x = unit(images)
    brightest = x.max((1, 2, 3), keepdims=True)
    return to_bytes((x + amount * clouds) * brightest / (brightest + amount))


def spatter(images: Images, severity: int, random: np.random.Generator) -> Images:
    """Drops of water, and from severity 4 on mud."""
    mean, spread, sigma, threshold, strength = at(
        severity,
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )
    layer = gaussian(_normal_layer(images, mean, spread, random), sigma)
    x = unit(images)
    if severity < 4:
        liquid = (255 * np.where(layer < threshold, 0, layer)).astype(np.int64).astype(np.uint8)
        return to_bytes(x + strength * drops(liquid)[..., None] * WATER)
    mask = blobs(layer, threshold, strength)[..., None]
    return to_bytes(x * (1 - mask) + mask * MUD)
