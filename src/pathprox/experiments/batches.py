"""Batches from data that lives on the device as one tensor: shuffled, cropped, flipped and normalised there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pathprox.experiments.data import Dataset, Split, normalized

AHEAD = 100
"""At least so many batches are prepared together, so that a small set costs little for each of them."""


class Batches:
    """The training batches of a run, by the number of the step.

    Order, crops and flips depend on the seed and the step alone, and are drawn on the CPU: the same on every device,
    and nothing to save when a run is continued. The last, incomplete batch of an epoch is left out.
    """

    def __init__(self, data: Dataset, size: int, seed: int, device: torch.device) -> None:
        if len(data.train) < size:
            raise ValueError(f"{data.name} has {len(data.train)} training images, fewer than a batch of {size}")
        self.per_epoch = len(data.train) // size
        self._epochs = -(-AHEAD // self.per_epoch)
        self._data, self._size, self._seed, self._device = data, size, seed, device
        self._images, self._labels = data.train.images.to(device), data.train.labels.to(device)
        if not data.crop and not data.flip:
            self._images = normalized(self._images, data.mean, data.std)
        self._block = -1
        self._ready: tuple[Tensor, Tensor] = (self._images[:0], self._labels[:0])

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the batch after ``step`` steps."""
        block, number = divmod(step, self._epochs * self.per_epoch)
        if block != self._block:
            self._block, self._ready = block, self._prepare(block)
        part = slice(number * self._size, (number + 1) * self._size)
        return self._ready[0][part], self._ready[1][part]

    def points(self) -> tuple[Tensor, Tensor]:
        """All training inputs, a row each, and labels."""
        return normalized(self._data.train.images, self._data.mean, self._data.std).flatten(1), self._data.train.labels

    def _prepare(self, block: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + block)
        used = self.per_epoch * self._size
        order = [torch.randperm(len(self._labels), generator=random)[:used] for _ in range(self._epochs)]
        chosen = torch.cat(order).to(self._device)
        images = self._images[chosen]
        if self._data.crop or self._data.flip:
            images = normalized(augmented(images, self._data, random), self._data.mean, self._data.std)
        return images, self._labels[chosen]


def augmented(images: Tensor, data: Dataset, random: torch.Generator) -> Tensor:
    """Cropped and flipped, as far as the training images of the set are."""
    if data.crop:
        images = crop(images, data.crop, random)
    return flip(images, random) if data.flip else images


def crop(images: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Each image padded with black on all sides, and a window of its own size cut out at a random place."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left = (torch.randint(0, 2 * padding + 1, (count,), generator=random).to(images.device) for _ in range(2))
    rows = top[:, None, None] + torch.arange(height, device=images.device)[:, None]
    columns = left[:, None, None] + torch.arange(width, device=images.device)
    which = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows, columns].permute(0, 3, 1, 2).contiguous()


def flip(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image mirrored with probability 1/2."""
    mirrored = torch.rand(len(images), generator=random).to(images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class Fixed:
    """A set of images to evaluate on, in large batches."""

    def __init__(self, data: Dataset, split: Split, device: torch.device, count: int | None = None) -> None:
        self._data = data
        self._images, self.labels = split.images[:count].to(device), split.labels[:count].to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self, size: int = 2500, random: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Images, normalised when their turn comes, and labels; with ``random`` augmented as in training."""
        for x, y in zip(self._images.split(size), self.labels.split(size), strict=True):
            seen = x if random is None else augmented(x, self._data, random)
            yield normalized(seen, self._data.mean, self._data.std), y
