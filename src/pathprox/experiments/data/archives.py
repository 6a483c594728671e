"""Unpacking the official archives, with nothing ever written outside of the data folder."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from pathprox.experiments.data.formats import damaged

_FAULTS = (
    *(tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, ValueError),
    *(RuntimeError, NotImplementedError),  # zipfile's, about a password or a method of packing
)


def unpack(archive: Path, top: str) -> Path:
    """The folder ``top`` of the archive, put next to it: complete or not at all, and only if it is not there yet."""
    target = archive.parent / top
    if target.exists():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f".{top}-", dir=archive.parent))
    try:
        try:
            _extract(archive, scratch)
        except _FAULTS as error:
            raise damaged(archive, "a complete and harmless archive", f"{type(error).__name__}: {error}") from error
        if not (scratch / top).is_dir():
            raise damaged(archive, f"a folder {top} in it", ", ".join(sorted(os.listdir(scratch))) or "nothing")
        _settle(scratch / top, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _extract(archive: Path, to: Path) -> None:
    if archive.suffix != ".zip":
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="data")
        return
    with zipfile.ZipFile(archive) as zipped:
        for name in zipped.namelist():
            # zipfile would drop such parts in silence; who put them there wanted no good
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name} leads out of the folder")
        zipped.extractall(to)


def _settle(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same files
            raise
