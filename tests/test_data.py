"""The data sets: official formats read right, damaged files refused, downloads checked."""

import gzip
import importlib
import io
import os
import pickle
import struct
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

import official
from official import half, same
from pathprox.experiments import data
from pathprox.experiments.data import corrupted, fetch, folder_of, load, normalized, sets

ROOT = Path(__file__).parent.parent


def everything(dataset):
    """All images of training and validation, sorted, to be compared as a set."""
    return sorted(image.numpy().tobytes() for image in torch.cat([dataset.train.images, dataset.val.images]))


# What is read


def test_the_embedded_subset_needs_no_files(tmp_path):
    embedded = load("mnist-embedded", tmp_path / "nothing")
    assert [len(s) for s in (embedded.train, embedded.val, embedded.test)] == [1000, 1000, 2000]
    assert embedded.train.labels.bincount().tolist() == [100] * 10
    assert embedded.train.images.shape == (1000, 1, 28, 28)
    assert embedded.origin == "embedded subset"


def test_the_normalised_subset_is_what_it_always_was():
    with files("pathprox.experiments").joinpath("mnist_subset.npz").open("rb") as file, np.load(file) as arrays:
        for part, split in data.mnist_subset().items():
            pixels = torch.from_numpy(arrays[f"{part}_x"].astype(np.float32) / 255)
            assert torch.equal(split.images, ((pixels - 0.1307) / 0.3081).unsqueeze(1))
            assert torch.equal(split.labels, torch.from_numpy(arrays[f"{part}_y"].astype(np.int64)))


def test_normalising_goes_by_channel_and_leaves_the_bytes_alone():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    before, mean, std = images.clone(), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    result = normalized(images, mean, std)
    assert result.dtype == torch.float32
    assert torch.equal(images, before)
    for c in range(3):
        torch.testing.assert_close(result[:, c], (images[:, c] / 255 - mean[c]) / std[c])


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_as_it_was_written(tmp_path, packed):
    official.write_mnist(tmp_path, 120, 30, packed=packed)
    mnist = load("mnist", tmp_path)
    assert everything(mnist) == sorted(image.tobytes() for image in official.digits("train", 120, (1, 28, 28))[0])
    images, labels = official.digits("test", 30, (1, 28, 28))
    assert torch.equal(mnist.test.images, torch.from_numpy(images))
    assert torch.equal(mnist.test.labels, torch.from_numpy(labels))
    assert mnist.test.images.dtype == torch.uint8
    assert mnist.test.labels.dtype == torch.int64
    assert (mnist.mean, mnist.std, mnist.crop, mnist.flip) == ((0.1307,), (0.3081,), 0, False)
    assert str(tmp_path) not in mnist.origin


def test_all_forms_of_cifar10_give_the_same(tmp_path):
    seen = []
    for python in (False, True):
        folder = tmp_path / str(python)
        official.write_cifar10(folder, python, 50, 20)
        seen.append(load("cifar10", folder))
        kind, ending = ("python", "py") if python else ("binary", "bin")
        archive = official.pack(folder, f"cifar-10-batches-{ending}", f"cifar-10-{kind}.tar.gz")
        seen += [load("cifar10", folder), load("cifar10", folder)]
        assert archive.exists()
        assert sorted(os.listdir(folder)) == [f"cifar-10-batches-{ending}", archive.name]
    images, labels = official.digits("test", 20, (3, 32, 32))
    assert torch.equal(seen[0].test.images, torch.from_numpy(images))
    assert torch.equal(seen[0].test.labels, torch.from_numpy(labels))
    assert everything(seen[0]) == sorted(image.tobytes() for image in official.digits("train", 50, (3, 32, 32))[0])
    assert all(same(seen[0], other) for other in seen[1:])
    assert (seen[0].crop, seen[0].flip, seen[0].std) == (4, True, (0.2023, 0.1994, 0.2010))


def test_the_binary_version_of_cifar10_is_preferred(tmp_path):
    official.write_cifar10(tmp_path, train=50, test=20)
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert len(load("cifar10", tmp_path).test) == 20


def test_svhn_in_another_scale_has_the_same_images(tmp_path):
    official.write_svhn(tmp_path, 60, 20)
    plain, half = load("svhn", tmp_path), load("svhn:half", tmp_path)
    assert torch.equal(plain.test.images, half.test.images)
    assert torch.equal(plain.train.labels, half.train.labels)
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    seen = normalized(ends, half.mean, half.std)
    assert seen.flatten().tolist() == [-1.0] * 3 + [1.0] * 3


def test_svhn_is_turned_upright_and_its_label_ten_is_zero(tmp_path):
    official.write_svhn(tmp_path, 60, 20)
    svhn = load("svhn", tmp_path)
    images, labels = official.digits("test", 20, (3, 32, 32))
    assert torch.equal(svhn.test.images, torch.from_numpy(images))
    assert torch.equal(svhn.test.labels, torch.from_numpy(labels))
    assert 0 in labels
    assert (svhn.crop, svhn.flip) == (0, False)


@pytest.mark.parametrize(
    ("name", "size", "train", "val"),
    [
        ("mnist", 60000, 55000, 5000),
        ("cifar10", 50000, 45000, 5000),
        ("svhn", 73257, 67257, 6000),
        ("mnist-100", 60000, 1000, 59000),
    ],
)
def test_the_splits_of_the_official_sizes(name, size, train, val):
    few, rest = sets._cut(sets._RECIPES[name], np.arange(size) % 10)
    assert (len(few), len(rest)) == (train, val)
    assert np.array_equal(np.sort(np.concatenate([few, rest])), np.arange(size))
    if name != "mnist-100":
        assert np.array_equal(rest, np.sort(np.random.default_rng(42).permutation(size)[:val]))


def test_other_draws_of_a_hundred_a_class_are_other_images():
    labels = np.arange(60000) % 10
    first, second, again = (sets._cut(sets._RECIPES[f"mnist-100{d}"], labels)[0] for d in ("", ":1", ":1"))
    assert np.array_equal(second, again)
    assert len(np.intersect1d(first, second)) < 100


def test_the_draw_of_the_authors_code_is_the_first_hundred_of_each_class_in_a_shuffled_set():
    labels = np.random.default_rng(0).integers(0, 10, 60000)
    few, rest = sets._cut(sets._RECIPES["mnist-100:authors"], labels)
    shuffled = torch.randperm(60000, generator=torch.Generator().manual_seed(42)).tolist()
    assert shuffled[:5] == [37542, 43087, 2992, 25810, 39634]  # torch's generator draws the same everywhere
    taken, count = [], [0] * 10
    for image in shuffled:
        if count[labels[image]] < 100:
            taken.append(image)
            count[labels[image]] += 1
    assert few.tolist() == sorted(taken)
    assert np.array_equal(np.sort(np.concatenate([few, rest])), np.arange(60000))


def test_small_sets_are_cut_in_the_same_proportion(tmp_path):
    official.write_mnist(tmp_path, 600, 20)
    mnist, few = load("mnist", tmp_path), load("mnist-100", tmp_path)
    assert (len(mnist.train), len(mnist.val)) == (550, 50)
    assert few.train.labels.bincount().tolist() == [30] * 10
    assert len(few.val) == 300
    assert everything(mnist) == everything(few)
    assert same(mnist, load("mnist", tmp_path))


def test_a_class_without_images_cannot_give_any(tmp_path):
    official.write_mnist(tmp_path, 15, 10)
    with pytest.raises(ValueError, match="two or more images of each class are needed, and of the class 5 there are 1"):
        load("mnist-100", tmp_path)
    with pytest.raises(ValueError, match="100 images of each class are needed, and of the class 1 there are 0"):
        sets.few_of_each(np.zeros(60000, np.int64), sets.at_random(np.random.default_rng(0)))


# Where it is looked for


def test_the_folder_is_the_argument_or_the_variable_or_the_cache(monkeypatch):
    monkeypatch.setenv("PATHPROX_DATA", "~/of variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert folder_of(Path("here")) == Path("here")
    assert folder_of(None) == Path.home() / "of variable"
    monkeypatch.setenv("PATHPROX_DATA", "")
    assert folder_of(None) == Path("/cache/pathprox")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_of(None) == Path.home() / ".cache/pathprox"


@pytest.mark.parametrize("name", ["mnist", "mnist-100", "cifar10", "svhn"])
def test_what_is_missing_is_told_with_place_address_and_command(tmp_path, name):
    with pytest.raises(FileNotFoundError) as caught:
        load(name, tmp_path)
    kind = name.removesuffix("-100")
    assert f"pathprox data fetch {kind}" in str(caught.value)
    for source in data.SOURCES[kind]:
        assert f"{tmp_path / source.path}  from  {source.addresses[0]}" in str(caught.value)


def test_only_what_is_missing_is_told(tmp_path):
    official.write_mnist(tmp_path, 20, 10)
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels") as caught:
        load("mnist", tmp_path)
    assert "images" not in str(caught.value)
    official.write_cifar10(tmp_path, train=10, test=10)
    (tmp_path / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin: delete the folder"):
        load("cifar10", tmp_path)


def test_unknown_names_are_told_the_known_ones(tmp_path):
    assert {"mnist-embedded", "mnist-100", "mnist", "cifar10", "svhn"} <= set(data.NAMES)
    with pytest.raises(ValueError, match="'imagenet': choose one of " + ", ".join(data.NAMES)):
        load("imagenet", tmp_path)
    with pytest.raises(ValueError, match="choose one of mnist-c, cifar10-c"):
        corrupted("svhn-c", tmp_path)
    with pytest.raises(ValueError, match="choose one of mnist, cifar10, svhn, mnist-c, cifar10-c"):
        fetch("mnist-100", tmp_path)


# What is refused


def idx(*header, data=b""):
    return gzip.compress(struct.pack(f">{len(header)}I", *header) + data)


def svhn(**content):
    file = io.BytesIO()
    savemat(file, content)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def always(new):
    return lambda old: new


IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/t10k-labels-idx1-ubyte.gz"
BATCH, PICKLE, MATLAB = (
    "cifar-10-batches-bin/data_batch_2.bin",
    "cifar-10-batches-py/test_batch",
    "svhn/train_32x32.mat",
)
FOG, FOG_LABELS, SNOW = "mnist_c/fog/test_images.npy", "mnist_c/fog/test_labels.npy", "CIFAR-10-C/snow.npy"
X = np.zeros((32, 32, 3, 20), np.uint8)
DAMAGES = [
    (IMAGES, half, "a gzipped file"),
    (IMAGES, always(b"<html>not found</html>"), "a gzipped file, found BadGzipFile"),
    (IMAGES, always(b""), "found"),
    (IMAGES, always(gzip.compress(b"abc")), r"a header \[2051, n, 28, 28\], found \[\]"),
    (IMAGES, always(idx(0x801, 20)), r"a header .* found \[2049, 20\]"),
    (IMAGES, always(idx(0x803, 20, 32, 32, data=bytes(20 * 1024))), r"found \[2051, 20, 32, 32\]"),
    (IMAGES, always(idx(0x803, 20, 28, 28, data=bytes(19 * 784))), r"20 times \(28, 28\) bytes .* 14896 bytes"),
    (IMAGES, always(idx(0x803, 0, 28, 28)), "labels"),
    (LABELS, always(idx(0x801, 11, data=bytes(11))), r"10 labels, one for each image, found the shape \(11,\)"),
    (LABELS, always(idx(0x801, 10, data=b"\x0a" * 10)), "labels from 0 to 9, found 10 to 10"),
    (BATCH, lambda old: old[:-1], "records of 3073 bytes"),
    (BATCH, always(b""), "records of 3073 bytes, found 0 bytes"),
    (BATCH, lambda old: old[:-3073], "4 images, as in the other batches, found 3"),
    (BATCH, lambda old: b"\xff" + old[1:], "labels from 0 to 9"),
    (PICKLE, half, "a pickled batch of CIFAR-10"),
    (PICKLE, always(b"hello"), "a pickled batch of CIFAR-10"),
    (PICKLE, always(pickle.dumps([1, 2])), "a pickled batch of CIFAR-10"),
    (PICKLE, always(pickle.dumps({b"data": 1, b"labels": [1]})), "rows of 3072 bytes, found int"),
    (PICKLE, always(official.python2_pickle({"data": np.zeros((2, 7), np.uint8), "labels": [1, 2]})), "rows of 3072"),
    (PICKLE, always(official.python2_pickle({"data": np.zeros((2, 3072), np.uint8), "labels": [1]})), "2 labels"),
    (PICKLE, always(official.python2_pickle({"data": np.zeros((1, 3072)), "labels": [1]})), "an array of b'f8'"),
    (MATLAB, half, "a Matlab file with X and y"),
    (MATLAB, always(b"<html>not found</html>"), "a Matlab file with X and y"),
    (MATLAB, always(b""), "a Matlab file with X and y"),
    (MATLAB, always(svhn(X=X)), "a Matlab file with X and y, found KeyError"),
    (MATLAB, always(svhn(X=X[:28], y=np.ones((20, 1)))), r"shape \(32, 32, 3, n\), found uint8 in the shape \(28,"),
    (MATLAB, always(svhn(X=X / 255, y=np.ones((20, 1)))), "X of bytes .* found float64"),
    (MATLAB, always(svhn(X=X, y=np.ones((19, 1), np.uint8))), "20 labels"),
    (MATLAB, always(svhn(X=X, y=np.zeros((20, 1), np.uint8))), "labels from 1 to 10, found 0 to 0"),
    (FOG, half, "an array in numpy's format"),
    (FOG, always(b""), "an array in numpy's format"),
    (FOG, always(npy(np.array([print], object))), "an array in numpy's format"),
    (FOG, always(npy(np.zeros((10, 28, 28), np.uint8))), r"bytes in the shape \(n, 28, 28, 1\)"),
    (FOG, always(npy(np.zeros((10, 28, 28, 1)))), "found float64"),
    (FOG_LABELS, always(npy(np.zeros(9, int))), "10 labels"),
    (FOG_LABELS, always(npy(np.zeros(10))), "whole numbers, found float64"),
    (SNOW, always(npy(np.zeros((11, 32, 32, 3), np.uint8))), "5 severities of equal size, found 11 images"),
]


@pytest.mark.parametrize(("path", "damage", "message"), DAMAGES)
def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path, path, damage, message):
    official.write_mnist(tmp_path, 20, 10)
    official.write_cifar10(tmp_path, python=path == PICKLE, train=20, test=10)
    official.write_svhn(tmp_path, 20, 10)
    official.write_mnist_c(tmp_path, 10, ("fog",))
    official.write_cifar10_c(tmp_path, 2, ("snow",))
    file = tmp_path / path
    file.write_bytes(damage(file.read_bytes()))
    name, read = {
        "mnist": ("mnist", load),
        "svhn": ("svhn", load),
        "mnist_c": ("mnist-c", corrupted),
        "CIFAR-10-C": ("cifar10-c", corrupted),
    }.get(file.relative_to(tmp_path).parts[0], ("cifar10", load))
    with pytest.raises(ValueError, match=message) as caught:
        read(name, tmp_path)
    told = str(caught.value)
    assert "Delete it, fetch again." in told
    assert str(file.parent) in told


class Evil:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path(MARK).touch()".replace("MARK", repr(str(self.mark))),)


@pytest.mark.parametrize("where", ["data", "labels", "other"])
def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path, where):
    official.write_cifar10(tmp_path, True, 10, 10)
    evil = Evil()
    evil.mark = tmp_path / "harm"
    batch = pickle.dumps({b"data": [], b"labels": []} | {where.encode(): evil})
    (tmp_path / PICKLE).write_bytes(batch)
    with pytest.raises(ValueError, match=r"test_batch .* found UnpicklingError: builtins\.exec, which has no place"):
        load("cifar10", tmp_path)
    assert not evil.mark.exists()
    pickle.loads(batch)  # it would have worked
    assert evil.mark.exists()


# The real files


def real(*paths):
    """A mark for tests that need these parts of the official data."""
    folder = Path(os.environ.get("PATHPROX_DATA", "/nowhere"))
    missing = [path for path in paths if not (folder / path).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} in $PATHPROX_DATA")


@pytest.mark.parametrize(
    ("name", "train", "val", "test", "mean"),
    [
        pytest.param("mnist", 55000, 5000, 10000, (0.1307,), marks=real("mnist")),
        pytest.param("cifar10", 45000, 5000, 10000, (0.4914, 0.4822, 0.4465), marks=real("cifar-10-batches-bin")),
        pytest.param("svhn", 67257, 6000, 26032, (0.4377, 0.4438, 0.4728), marks=real("svhn")),
    ],
)
def test_the_official_files_have_the_published_counts_and_means(name, train, val, test, mean):
    whole = load(name)
    assert [len(s) for s in (whole.train, whole.val, whole.test)] == [train, val, test]
    for split in (whole.train, whole.val, whole.test):
        assert split.labels.unique().tolist() == list(range(10))
    sums = sum(s.images.flatten(2).sum(2, dtype=torch.int32).sum(0) for s in (whole.train, whole.val))
    pixels = (train + val) * whole.train.images[0, 0].numel()
    assert (sums / pixels / 255).tolist() == pytest.approx(mean, abs=1e-4)


@real("mnist")
def test_the_embedded_training_images_are_those_of_task_1(tmp_path):
    task, embedded = load("mnist-100"), load("mnist-embedded")
    assert torch.equal(task.train.images, embedded.train.images)
    assert torch.equal(task.train.labels, embedded.train.labels)
    assert (len(task.val), len(task.test)) == (59000, 10000)


@real("mnist")
def test_the_script_makes_the_embedded_subset_again(tmp_path, monkeypatch):
    script = ROOT / "scripts/make_mnist_subset.py"
    if not script.exists():
        pytest.skip("the scripts are not in a source distribution")
    monkeypatch.syspath_prepend(script.parent)
    importlib.import_module("make_mnist_subset").main(folder_of(None), tmp_path / "subset.npz")
    shipped = ROOT / "src/pathprox/experiments/mnist_subset.npz"
    with np.load(tmp_path / "subset.npz") as new, np.load(shipped) as old:
        assert new.files == old.files
        assert all(np.array_equal(new[part], old[part]) for part in old.files)
