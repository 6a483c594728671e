"""The corrupted sets: read where they are, packed or not, and bad archives refused."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import official
from official import half, left
from pathprox.experiments import data
from pathprox.experiments.data import corrupted, load

ROOT = Path(__file__).parent.parent


def test_mnist_c_has_one_part_for_each_corruption(tmp_path):
    official.write_mnist_c(tmp_path, 20)
    mnist_c = corrupted("mnist-c", tmp_path)
    assert (mnist_c.name, mnist_c.origin, mnist_c.missing) == ("mnist-c", "official", ())
    parts = dict(mnist_c.parts())
    assert tuple(parts) == data.MNIST_C
    assert len(parts) == 15
    images, labels = official.digits("test", 20, (1, 28, 28))
    assert torch.equal(parts["shot_noise"].images, torch.from_numpy(images))
    for part in parts.values():
        assert part.images.shape == (20, 1, 28, 28)
        assert torch.equal(part.labels, torch.from_numpy(labels))


def test_cifar10_c_has_one_part_for_each_severity(tmp_path):
    official.write_cifar10_c(tmp_path, 10)
    parts = dict(corrupted("cifar10-c", tmp_path).parts())
    assert list(parts) == [f"{c}/{severity}" for c in data.CIFAR10_C for severity in range(1, 6)]
    images, labels = official.digits("test", 10, (3, 32, 32))
    for severity in range(1, 6):
        expected = official.disturbed(images, 10 + 5 * severity).transpose(0, 3, 1, 2)
        assert np.array_equal(parts[f"shot_noise/{severity}"].images.numpy(), expected)
        assert np.array_equal(parts[f"shot_noise/{severity}"].labels.numpy(), labels)


def test_the_official_images_go_before_the_generated_even_if_some_are_missing(tmp_path):
    official.write_mnist_c(tmp_path, 10, generated=True)
    (tmp_path / "mnist_c").mkdir()
    assert corrupted("mnist-c", tmp_path).origin == "generated"
    official.write_mnist_c(tmp_path, 10, data.MNIST_C[2:])
    (tmp_path / "mnist_c/zigzag/test_labels.npy").unlink()
    mnist_c = corrupted("mnist-c", tmp_path)
    assert (mnist_c.origin, mnist_c.missing) == ("official", ("shot_noise", "impulse_noise", "zigzag"))
    assert len(list(mnist_c.parts())) == 12


def test_the_four_extra_corruptions_are_read_when_asked(tmp_path):
    official.write_cifar10_c(tmp_path, 2, (*data.CIFAR10_C, "spatter"))
    assert "spatter/1" not in dict(corrupted("cifar10-c", tmp_path).parts())
    more = corrupted("cifar10-c", tmp_path, extra=True)
    assert "spatter/5" in dict(more.parts())
    assert more.missing == ("speckle_noise", "gaussian_blur", "saturate")


def test_a_part_is_read_only_when_its_turn_comes(tmp_path):
    official.write_mnist_c(tmp_path, 10)
    parts = corrupted("mnist-c", tmp_path).parts()
    next(parts)
    (tmp_path / "mnist_c/impulse_noise/test_images.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="impulse_noise"):
        next(parts)


@pytest.mark.parametrize("name", ["mnist-c", "cifar10-c"])
def test_without_corrupted_images_both_cures_are_told(tmp_path, name):
    with pytest.raises(FileNotFoundError) as caught:
        corrupted(name, tmp_path)
    source = data.SOURCES[name][0]
    top = tmp_path / source.instead[0]
    for expected in (f"pathprox data make {name}", f"data fetch {name}", source.path, source.addresses[0], f"{top}/"):
        assert expected in str(caught.value)
    assert f"{top}-generated" in str(caught.value)


def test_the_official_archives_are_unpacked_where_they_lie(tmp_path):
    official.write_mnist_c(tmp_path, 10)
    official.write_cifar10_c(tmp_path, 2)
    official.pack(tmp_path, "mnist_c", "mnist_c.zip")
    official.pack(tmp_path, "CIFAR-10-C", "CIFAR-10-C.tar")
    for name, parts in (("mnist-c", 15), ("cifar10-c", 75)):
        for _ in range(2):
            assert corrupted(name, tmp_path).origin == "official"
            assert len(list(corrupted(name, tmp_path).parts())) == parts
    assert sorted(os.listdir(tmp_path)) == ["CIFAR-10-C", "CIFAR-10-C.tar", "mnist_c", "mnist_c.zip"]


def evil_zip(path, name):
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr(zipfile.ZipInfo(name), b"harm")


def evil_tar(path, name):
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())


def evil_link(path, name):
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("CIFAR-10-C/link")
        link.type, link.linkname = tarfile.SYMTYPE, name
        tar.addfile(link)


def nothing_in_it(path, name):
    evil_zip(path, "other/file") if path.suffix == ".zip" else evil_tar(path, "other")


def no_archive(path, name):
    path.write_bytes(b"<html>not found</html>" * 100)


@pytest.mark.parametrize(
    ("archive", "make", "message"),
    [
        ("mnist_c.zip", evil_zip, "leads out of the folder"),
        ("CIFAR-10-C.tar", evil_tar, "OutsideDestinationError"),
        ("CIFAR-10-C.tar", evil_link, "LinkOutsideDestinationError"),
        ("mnist_c.zip", nothing_in_it, "a folder mnist_c in it, found other"),
        ("CIFAR-10-C.tar", nothing_in_it, "a folder CIFAR-10-C in it, found other"),
        ("mnist_c.zip", no_archive, "BadZipFile"),
        ("CIFAR-10-C.tar", no_archive, "ReadError"),
    ],
)
def test_a_bad_archive_is_refused_and_leaves_nothing(tmp_path, archive, make, message):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder / archive, "../../harm")
    with pytest.raises(ValueError, match=f"{archive} is damaged or another file: .*{message}"):
        corrupted("mnist-c" if archive.endswith("zip") else "cifar10-c", folder)
    assert left(tmp_path) == [folder / archive]
    assert os.listdir(folder) == [archive]


def test_a_truncated_archive_is_refused_and_leaves_nothing(tmp_path):
    official.write_cifar10(tmp_path, train=50, test=10)
    archive = official.pack(tmp_path, "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
    archive.write_bytes(half(archive.read_bytes()))
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz is damaged"):
        load("cifar10", tmp_path)
    assert os.listdir(tmp_path) == [archive.name]
