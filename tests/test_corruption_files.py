"""The files of the corrupted sets: their layout, cache and failures."""

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from corrupting import ALL_CIFAR, SEVERITIES, assert_same_files, digits, labels, loaded, photos, random
from pathprox.experiments import data
from pathprox.experiments.corruptions import (
    CIFAR10_C,
    CIFAR10_C_EXTRA,
    MNIST_C,
    cifar,
    make,
    make_cifar10_c,
    make_mnist_c,
    mnist,
    weather,
)


def test_what_is_made_is_what_is_read():
    """The names stand twice, since reading a set must not need what making one does."""
    assert tuple(MNIST_C) == data.MNIST_C
    assert tuple(CIFAR10_C) == data.CIFAR10_C
    assert tuple(CIFAR10_C_EXTRA) == data.CIFAR10_C_EXTRA


def test_mnist_c_has_the_layout_of_the_published_set(tmp_path):
    assert make_mnist_c(digits(), labels(), tmp_path, workers=1) == {}
    files = loaded(tmp_path)
    expected = {f"{name}/test_{part}.npy" for name in ["identity", *MNIST_C] for part in ("images", "labels")}
    assert set(files) == expected
    assert {file.shape for name, file in files.items() if "images" in name} == {(12, 28, 28, 1)}
    assert all((file == labels()).all() for name, file in files.items() if "labels" in name)
    np.testing.assert_array_equal(files["identity/test_images.npy"][..., 0], digits())
    np.testing.assert_array_equal(files["stripe/test_images.npy"][..., 0], mnist.stripe(digits(), random()))


def test_cifar10_c_has_the_layout_of_the_published_set(tmp_path, frost_folder):
    folder = tmp_path / "set"
    assert make_cifar10_c(photos(), labels(), folder, workers=1, extra=True, frost=frost_folder) == {}
    files = loaded(folder)
    assert set(files) == {f"{name}.npy" for name in ["labels", *ALL_CIFAR]}
    np.testing.assert_array_equal(files.pop("labels.npy"), np.tile(labels(), 5))
    assert {(file.shape, file.dtype.name) for file in files.values()} == {((60, 32, 32, 3), "uint8")}
    for severity in SEVERITIES:
        part = files["contrast.npy"][12 * (severity - 1) : 12 * severity]
        np.testing.assert_array_equal(part, cifar.contrast(photos(), severity, random()))


def test_a_corruption_is_the_same_for_any_number_of_workers(tmp_path, frost_folder, monkeypatch):
    monkeypatch.setattr(make, "CHUNK", 5)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, workers in ((one, 1), (two, 2)):
        make_mnist_c(digits(), labels(), folder / "mnist", workers=workers)
        make_cifar10_c(photos(), labels(), folder / "cifar", workers=workers, extra=True, frost=frost_folder)
    assert_same_files(one, two)


def test_a_corruption_does_not_depend_on_the_others_that_are_made(tmp_path):
    make_mnist_c(digits(), labels(), tmp_path / "all", workers=1)
    make_mnist_c(digits(), labels(), tmp_path / "one", workers=1, names=["zigzag"])
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["identity", "made.json", "zigzag"]
    whole, single = loaded(tmp_path / "all"), loaded(tmp_path / "one")
    np.testing.assert_array_equal(whole["zigzag/test_images.npy"], single["zigzag/test_images.npy"])


def test_seeds_severities_and_chunks_have_draws_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "CHUNK", 6)
    same = np.repeat(photos(1), 12, axis=0)
    for seed in (0, 1):
        make_cifar10_c(same, labels(), tmp_path / str(seed), seed=seed, workers=1, names=["impulse_noise"])
    out = np.concatenate([np.load(tmp_path / str(seed) / "impulse_noise.npy") for seed in (0, 1)])
    assert len(np.unique(out.reshape(len(out), -1), axis=0)) == len(out)
    weak, strong = out[:12] != same, out[48:60] != same
    assert not strong[weak].all()  # with the same draws, the stronger noise would hit all that the weaker one hits


def test_what_is_there_is_not_made_again(tmp_path):
    make_mnist_c(digits(), labels(), tmp_path, workers=1, names=["stripe"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    seen = []
    make_mnist_c(
        digits(), labels(), tmp_path, workers=1, names=["stripe", "scale"], progress=lambda *at: seen.append(at)
    )
    assert seen == [("scale", 1, 1)]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_progress_counts_the_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "CHUNK", 5)
    seen = []
    names = ["contrast", "fog"]
    make_cifar10_c(photos(), labels(), tmp_path, workers=1, names=names, progress=lambda *at: seen.append(at))
    assert seen == [("fog" if i < 16 else "contrast", i, 30) for i in range(1, 31)]


def test_a_half_written_file_is_made_again(tmp_path):
    make_mnist_c(digits(), labels(), tmp_path / "whole", workers=1, names=["stripe", "fog", "scale"])
    make_mnist_c(digits(), labels(), tmp_path / "cut", workers=1, names=["stripe", "fog", "scale"])
    for name, size in (("stripe", 500), ("fog", 0)):
        os.truncate(tmp_path / "cut" / name / "test_images.npy", size)
    np.save(tmp_path / "cut" / "scale" / "test_images.npy", digits()[:3])
    os.truncate(tmp_path / "cut" / "fog" / "test_labels.npy", 140)
    make_mnist_c(digits(), labels(), tmp_path / "cut", workers=1, names=["stripe", "fog", "scale"])
    assert_same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_disk_that_fails_leaves_no_half_file(tmp_path, monkeypatch):
    def fail(file, array):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(make.np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        make._save(tmp_path / "fog.npy", np.zeros(3))
    assert not list(tmp_path.iterdir())


KILLED = """
import os
from pathlib import Path
import numpy as np
from pathprox.experiments.corruptions import make
make.CHUNK = 5
folder = Path({folder!r})
arrays = np.load(folder / "clean.npz")
stop = lambda name, done, total: done == 5 and os._exit(9)
make.make_mnist_c(arrays["x"], arrays["y"], folder / "killed", workers=1, names=["stripe", "fog"], progress=stop)
"""


def test_a_killed_run_is_taken_up_again(tmp_path, monkeypatch):
    np.savez(tmp_path / "clean.npz", x=digits(), y=labels())
    result = subprocess.run([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], check=False, timeout=100)
    assert result.returncode == 9
    assert len(loaded(tmp_path / "killed")) == 5  # one corruption, the clean digits, and the labels of all three
    monkeypatch.setattr(make, "CHUNK", 5)
    for name in ("killed", "fresh"):
        make_mnist_c(digits(), labels(), tmp_path / name, workers=1, names=["stripe", "fog"])
    assert_same_files(tmp_path / "killed", tmp_path / "fresh")


def test_the_folder_says_what_it_holds(tmp_path):
    make_mnist_c(digits(), labels(), tmp_path, seed=3, workers=1, names=["stripe"])
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["set"], made["seed"], made["images"]) == ("MNIST-C", 3, 12)
    assert {"pathprox", "recipe", "chunk", "images_sha256", "labels_sha256"} <= set(made)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 1}, "seed is 0, not 1"),
        ({"images": digits(11), "labels": labels(11)}, "images is 12, not 11"),
        ({"images": digits()[::-1]}, "images_sha256"),
        ({"labels": labels()[::-1]}, "labels_sha256"),
    ],
)
def test_a_folder_with_another_set_is_refused(tmp_path, change, what):
    asked = {"images": digits(), "labels": labels(), "folder": tmp_path, "workers": 1, "names": ["stripe"]}
    make_mnist_c(**asked)
    with pytest.raises(ValueError, match=rf"{what}.*delete the folder or choose another one"):
        make_mnist_c(**asked | change)


def test_a_folder_with_published_files_is_not_written_into(tmp_path):
    np.save(tmp_path / "fog.npy", photos())
    with pytest.raises(ValueError, match="not made here"):
        make_cifar10_c(photos(), labels(), tmp_path, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["fog.npy"]


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_note_that_cannot_be_read_is_an_error_with_a_cure(tmp_path, text):
    (tmp_path / "made.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot be read.*delete the folder"):
        make_mnist_c(digits(), labels(), tmp_path, workers=1)


def test_without_its_pictures_frost_alone_is_missing(tmp_path, frost_folder, monkeypatch):
    monkeypatch.setattr(weather, "find_spec", lambda name: None)
    folder = tmp_path / "set"
    ask = partial(make_cifar10_c, photos(), labels(), folder, workers=1, names=["frost", "contrast"])
    assert "imagecorruptions" in ask()["frost"]
    assert set(loaded(folder)) == {"labels.npy", "contrast.npy"}
    (tmp_path / "empty").mkdir()
    assert "lacks frost1.png" in ask(frost=tmp_path / "empty")["frost"]
    assert ask(frost=frost_folder) == {}
    assert set(loaded(folder)) == {"labels.npy", "contrast.npy", "frost.npy"}
    assert ask() == {}  # what is there needs no pictures


def test_the_pictures_of_an_installed_package_are_found_without_importing_it(tmp_path, frost_folder, monkeypatch):
    package = tmp_path / "imagecorruptions"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('too old')")
    frost_folder.rename(package / "frost")
    monkeypatch.syspath_prepend(tmp_path)
    assert weather.find_frost() == package / "frost"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": photos().astype(np.float32)}, "float32, not uint8"),
        ({"images": photos()[..., 0]}, r"not \(n, 32, 32, 3\)"),
        ({"images": photos()[:0]}, "shape"),
        ({"labels": labels(11)}, "one whole number for each of the 12 images"),
        ({"labels": labels() / 2}, "one whole number"),
        ({"names": ["fog", "fgo"]}, "no corruption fgo: choose from gaussian_noise"),
        ({"seed": -1}, "choose 0 or more"),
        ({"workers": 0}, "choose 1 or more"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, change, message):
    asked = {"images": photos(), "labels": labels(), "folder": tmp_path / "set", "workers": 1}
    with pytest.raises(ValueError, match=message):
        make_cifar10_c(**asked | change)
    assert not (tmp_path / "set").exists()
