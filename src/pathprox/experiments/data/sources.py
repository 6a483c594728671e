"""Where the official files come from, where they go, and fetching them.

The hashes are of the files as they were published, and only a download is compared with them: a file that is there
already may have been packed anew, and is judged by its content when it is read.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK, TIMEOUT = 1 << 18, 30
"""Bytes between two looks at the progress bar; seconds without a byte after which the next mirror is tried."""


@dataclass(frozen=True)
class Source:
    """One official file."""

    path: str
    """Where it goes, in the data folder."""
    hash: str
    addresses: tuple[str, ...]
    """The same file at each, tried in turn."""
    instead: tuple[str, ...] = ()
    """Other paths, any of which makes it needless: what an archive unpacks to, another version."""

    def needless(self, folder: Path) -> bool:
        return any((folder / path).exists() for path in (self.path, *self.instead))


def _mnist(name: str, md5: str) -> Source:
    hosts = "https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"
    return Source(
        f"mnist/{name}.gz", f"md5:{md5}", tuple(f"{host}{name}.gz" for host in hosts), instead=(f"mnist/{name}",)
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        _mnist("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _mnist("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
        _mnist("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
        _mnist("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "cifar10": (
        Source(
            "cifar-10-binary.tar.gz",
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            instead=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
        ),
    ),
    "svhn": (
        Source(
            "svhn/train_32x32.mat",
            "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
        ),
        Source(
            "svhn/test_32x32.mat",
            "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
        ),
    ),
    "mnist-c": (
        Source(
            "mnist_c.zip",
            "sha256:af9ee8c6a815870c7fdde5af84c7bf8db0bcfa1f41056db83871037fba70e493",
            ("https://zenodo.org/record/3239543/files/mnist_c.zip",),
            instead=("mnist_c",),
        ),
    ),
    "cifar10-c": (
        Source(
            "CIFAR-10-C.tar",
            "sha256:c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
            ("https://zenodo.org/record/2535967/files/CIFAR-10-C.tar",),
            instead=("CIFAR-10-C",),
        ),
    ),
}

TERMS = {"svhn": "SVHN is for non-commercial research use only: http://ufldl.stanford.edu/housenumbers"}


def folder_of(data_dir: Path | None) -> Path:
    """The folder of all data: the argument, else $PATHPROX_DATA, else the one for pathprox in the user's cache."""
    if data_dir is not None:
        return Path(data_dir)
    if named := os.environ.get("PATHPROX_DATA"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pathprox"


def fetch(name: str, folder: Path | None = None, base: Mapping[str, Sequence[Source]] | None = None) -> list[Path]:
    """Download the files of a set that are not there yet, and return them. ``base`` replaces the official sources."""
    known = SOURCES if base is None else base
    if name not in known:
        raise ValueError(f"there is nothing to fetch for {name!r}: choose one of {', '.join(known)}.")
    folder = folder_of(folder)
    wanted = [source for source in known[name] if not source.needless(folder)]
    if wanted and name in TERMS:
        sys.stderr.write(TERMS[name] + "\n")
    for source in wanted:
        _download(name, source, folder)
    return [folder / source.path for source in wanted]


def absent(name: str, folder: Path, sources: Iterable[Source]) -> FileNotFoundError:
    """What to say when files are not there."""
    places = "".join(f"\n  {folder / source.path}  from  {source.addresses[0]}" for source in sources)
    return FileNotFoundError(f"{name} is not there. Run `pathprox data fetch {name}`, or put in place:{places}")


def _download(name: str, source: Source, folder: Path) -> None:
    target, failures = folder / source.path, list[Exception]()
    for address in source.addresses:
        failure = _try(address, source.hash, target)
        if failure is None:
            return
        failures.append(failure)
    # What is no error of the connection is pooch's about a file with another hash.
    kind = ConnectionError if all(isinstance(failure, OSError) for failure in failures) else ValueError
    pairs = zip(source.addresses, failures, strict=True)
    seen = "".join(f"\n  {address}  ({failure})" for address, failure in pairs)
    cure = f"Run `pathprox data fetch {name}` again later, or put the file at {target} from elsewhere than:{seen}"
    raise kind(f"{target.name} could not be fetched. {cure}")


def _try(address: str, known_hash: str, target: Path) -> Exception | None:
    """Fetch one file, or say why it did not work. It appears complete and with the right hash, or not at all."""
    try:
        pooch, requests = importlib.import_module("pooch"), importlib.import_module("requests")
    except ImportError as error:
        raise ImportError(f"a package is missing ({error}): pip install 'pathprox[experiments]'") from error
    pooch.get_logger().setLevel("WARNING")  # the progress bar says enough
    try:
        pooch.retrieve(address, known_hash, fname=target.name, path=target.parent, downloader=_stream)
    except (requests.RequestException, ValueError) as error:
        if target.parent.is_dir() and not any(target.parent.iterdir()):  # pooch has made it
            target.parent.rmdir()
        return error
    return None


def _stream(address: str, path: str, pooch: object) -> None:
    """The downloader for pooch: its own one wants tqdm for a progress bar, and leaves connections open."""
    import requests
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    # A file that ends in .gz shall come as it is; some servers would have it unpacked on the way.
    options: dict[str, Any] = {"stream": True, "timeout": TIMEOUT, "headers": {"Accept-Encoding": "identity"}}
    with requests.get(address, **options) as response, open(path, "wb") as file:
        response.raise_for_status()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            size = int(response.headers.get("content-length", 0)) or None
            task = progress.add_task(address.rpartition("/")[2], total=size)
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                progress.advance(task, len(chunk))
