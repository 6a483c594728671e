"""Makes the corrupted sets on all cores and writes them in the layouts of the published ones.

What an image becomes depends on the seed, the corruption, the severity and the image's place in the set, and on nothing
else: the images are cut into chunks of a fixed size, and each chunk has a random generator of its own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pathprox import __version__
from pathprox.experiments.corruptions.blocks import Images
from pathprox.experiments.corruptions.cifar import CIFAR10_C, CIFAR10_C_EXTRA
from pathprox.experiments.corruptions.mnist import MNIST_C
from pathprox.experiments.corruptions.weather import find_frost, frost_pictures

CHUNK = 500
"""Images that share a random generator. A larger number would change the sets, and take more memory."""
RECIPE = 1
"""To be raised by any change after which the same seed gives other images."""
SEVERITIES = range(1, 6)
Labels = npt.NDArray[np.integer]
Progress = Callable[[str, int, int], None]
"""Is told the corruption at work, the chunks done and the chunks there are to do."""


@dataclass(frozen=True)
class Job:
    """One file to be made."""

    name: str
    """The corruption."""
    path: Path
    """Where its images go."""
    shape: tuple[int, ...]
    """What the finished file holds."""
    corruptions: Sequence[tuple[int, Callable[..., Images]]]
    """What is done to all images, one after the other in the file: severity (0 if there are none) and function."""

    def chunks(self, images: Images) -> int:
        """How many chunks it takes."""
        return len(self.corruptions) * len(range(0, len(images), CHUNK))


def make_mnist_c(
    images: Images,
    labels: Labels,
    folder: Path,
    *,
    seed: int = 0,
    workers: int | None = None,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write ``folder/<corruption>/test_images.npy`` and ``test_labels.npy`` for digits ``(n, 28, 28)``.

    The clean digits come along as the corruption `identity`. What is there already is not made again. With more than
    one worker, a script has to call this under ``if __name__ == "__main__":``, because the workers import the script.

    Returns:
        The corruptions that could not be made, each with the reason. For this set there are none.
    """
    _check(images, labels, (28, 28), seed, workers)
    chosen = _choose(names, MNIST_C, ["identity", *MNIST_C])
    _claim(folder, "MNIST-C", images, labels, seed)
    shape = (len(images), 28, 28, 1)
    for name in dict.fromkeys(["identity", *chosen]):
        _keep(folder / name / "test_labels.npy", labels.astype(np.int64))
    _keep(folder / "identity" / "test_images.npy", images.reshape(shape))
    jobs = [
        Job(name, folder / name / "test_images.npy", shape, [(0, MNIST_C[name])]) for name in chosen if name in MNIST_C
    ]
    _work([job for job in jobs if not _complete(job.path, job.shape)], images, seed, workers, progress)
    return {}


def make_cifar10_c(
    images: Images,
    labels: Labels,
    folder: Path,
    *,
    seed: int = 0,
    workers: int | None = None,
    names: Iterable[str] | None = None,
    extra: bool = False,
    frost: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write ``folder/<corruption>.npy`` (severity 1 first) and ``labels.npy`` for images ``(n, 32, 32, 3)``.

    What is there already is not made again. With more than one worker, a script has to call this under
    ``if __name__ == "__main__":``, because the workers import the script.

    Args:
        images: The clean test images.
        labels: Their classes.
        folder: Where the set goes.
        seed: Other seeds give other draws.
        workers: Processes to use; all cores by default.
        names: The corruptions to make; the fifteen by default.
        extra: Whether the default includes the four extra ones.
        frost: Where the pictures frost1.png .. frost5.jpg are; by default those of the package `imagecorruptions`.
        progress: Called after every chunk.

    Returns:
        The corruptions that could not be made, each with the reason: `frost` without its pictures.
    """
    _check(images, labels, (32, 32, 3), seed, workers)
    every: dict[str, Callable[..., Images]] = {**CIFAR10_C, **CIFAR10_C_EXTRA}
    chosen = _choose(names, every if extra else CIFAR10_C, every)
    _claim(folder, "CIFAR-10-C", images, labels, seed)
    _keep(folder / "labels.npy", np.tile(labels.astype(np.int64), len(SEVERITIES)))
    shape = (len(SEVERITIES) * len(images), 32, 32, 3)
    chosen = [name for name in chosen if not _complete(folder / f"{name}.npy", shape)]
    missing = {}
    if "frost" in chosen:
        try:
            every["frost"] = partial(every["frost"], pictures=frost_pictures(find_frost(frost)))
        except FileNotFoundError as reason:
            missing["frost"] = str(reason)
    jobs = [
        Job(name, folder / f"{name}.npy", shape, [(s, partial(every[name], severity=s)) for s in SEVERITIES])
        for name in chosen
        if name not in missing
    ]
    _work(jobs, images, seed, workers, progress)
    return missing


def _check(images: Images, labels: Labels, shape: tuple[int, ...], seed: int, workers: int | None) -> None:
    if images.dtype != np.uint8:
        raise ValueError(f"the images are {images.dtype}, not uint8: pass the bytes of the clean set, not normalised")
    if images.shape[1:] != shape or not len(images):
        wanted = ", ".join(["n", *map(str, shape)])
        raise ValueError(f"the images have shape {images.shape}, not ({wanted}): reshape them; channels come last")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"the labels are {labels.dtype} of shape {labels.shape}: pass one whole number for each of the "
            f"{len(images)} images"
        )
    if seed < 0:
        raise ValueError(f"seed {seed} is negative: choose 0 or more")
    if workers is not None and workers < 1:
        raise ValueError(f"{workers} workers cannot work: choose 1 or more, or None for all cores")


def _choose(names: Iterable[str] | None, default: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names asked for, in the published order."""
    known = list(known)
    asked = set(default if names is None else names)
    if unknown := sorted(asked.difference(known)):
        raise ValueError(f"there is no corruption {', '.join(unknown)}: choose from {', '.join(known)}")
    return [name for name in known if name in asked]


def _claim(folder: Path, title: str, images: Images, labels: Labels, seed: int) -> None:
    """Write down what the folder holds, or make sure that it holds what is asked for.

    Without this, a set made from other images or with another seed would pass for the one asked for, and files of two
    sets would be mixed. A published set has no such note, so it cannot be written into either.
    """
    asked = {
        "set": title,
        "recipe": RECIPE,
        "seed": seed,
        "chunk": CHUNK,
        "images": len(images),
        "images_sha256": _digest(images),
        "labels_sha256": _digest(labels.astype(np.int64)),
    }
    cure = "delete the folder or choose another one"
    note = folder / "made.json"
    if not note.exists():
        if any(folder.rglob("*.npy")):
            raise ValueError(f"{folder} holds files that were not made here (there is no made.json): {cure}")
        text = json.dumps({"pathprox": __version__, **asked}, indent=2) + "\n"
        _write(note, lambda file: file.write(text.encode()))
        return
    try:
        found = dict(json.loads(note.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{note} cannot be read ({error}): {cure}") from error
    other = [f"{key} is {found.get(key)!r}, not {value!r}" for key, value in asked.items() if found.get(key) != value]
    if other:
        raise ValueError(f"{folder} holds another set than the one asked for ({'; '.join(other)}): {cure}")


def _digest(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _work(jobs: Sequence[Job], images: Images, seed: int, workers: int | None, progress: Progress | None) -> None:
    done, total = 0, sum(job.chunks(images) for job in jobs)
    with _mapper(workers or _cores()) as spread:
        for job in jobs:
            made = []
            for chunk in spread(_corrupt, *zip(*_tasks(job, images, seed), strict=True)):
                made.append(chunk)
                done += 1
                if progress is not None:
                    progress(job.name, done, total)
            _save(job.path, np.concatenate(made).reshape(job.shape))


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tasks(job: Job, images: Images, seed: int) -> Iterator[tuple[Callable[..., Images], Images, tuple[int, ...]]]:
    name = zlib.crc32(job.name.encode())
    for severity, corrupt in job.corruptions:
        for number, start in enumerate(range(0, len(images), CHUNK)):
            yield corrupt, images[start : start + CHUNK], (seed, name, severity, number)


def _corrupt(corrupt: Callable[..., Images], images: Images, entropy: tuple[int, ...]) -> Images:
    return corrupt(images, random=np.random.default_rng(np.random.SeedSequence(entropy)))


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterator[Images]]]:
    """Something that maps like `map`, in this process or in several.

    They are spawned, not forked: a fork of a process in which torch has started threads may hang.
    """
    if workers == 1:
        yield map
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _complete(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> bool:
    """Whether the file is there and whole: one that was cut off cannot be mapped."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return array.shape == shape and array.dtype == dtype


def _keep(path: Path, array: npt.NDArray[Any]) -> None:
    if not _complete(path, array.shape, array.dtype):
        _save(path, array)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    _write(path, lambda file: np.save(file, array))


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write under a name of this process alone and rename when done, so that no half file ever has the real name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
