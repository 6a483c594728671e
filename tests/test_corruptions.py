"""The corrupted test sets: each corruption on its own, and the files made of them."""

import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pathprox.experiments.corruptions import (
    CIFAR10_C,
    CIFAR10_C_EXTRA,
    MNIST_C,
    blocks,
    cifar,
    make,
    make_cifar10_c,
    make_mnist_c,
    mnist,
    water,
    weather,
)

SEVERITIES = range(1, 6)
ALL_CIFAR = {**CIFAR10_C, **CIFAR10_C_EXTRA}


def random(seed=0):
    return np.random.default_rng(seed)


def digits(n=12):
    """Thick strokes on black, no two alike."""
    row, col = np.mgrid[:28, :28]
    start, slope = random(1).uniform(8, 20, (n, 1, 1)), random(2).uniform(-0.5, 0.5, (n, 1, 1))
    stroke = np.exp(-((row - start - slope * (col - 14)) ** 2) / 4) * (abs(col - 14) < 9)
    return (255 * stroke).astype(np.uint8)


def photos(n=12):
    """Smooth colours with an edge, no two alike."""
    x = blocks.gaussian(random(3).uniform(0, 1, (n, 32, 32, 3)), 2)
    x = (x - x.min()) / (x.max() - x.min()) * 0.7
    x[:, 10:20, 8:24] += 0.25
    return (255 * x).astype(np.uint8)


def labels(n=12):
    return np.arange(n) % 10


def blank(value=0, n=4, side=32):
    return np.full((n, side, side, 3) if side == 32 else (n, side, side), value, np.uint8)


def corrupt_photos(name, images, severity, generator=None):
    """Frost gets pictures of ice that are made here."""
    function = ALL_CIFAR[name]
    if name == "frost":
        function = partial(function, pictures=[random(4).integers(80, 255, (50, 60, 3), dtype=np.uint8)])
    return function(images, severity, generator or random())


@pytest.fixture
def frost_folder(tmp_path):
    folder = tmp_path / "ice"
    folder.mkdir()
    for i, name in enumerate(weather.FROST_FILES):
        Image.fromarray(random(i).integers(80, 255, (200 + 5 * i, 300, 3), dtype=np.uint8)).save(folder / name)
    return folder


def loaded(folder):
    return {path.relative_to(folder).as_posix(): np.load(path) for path in sorted(folder.rglob("*.npy"))}


def assert_same_files(first, second):
    first, second = loaded(first), loaded(second)
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# every corruption


def assert_is_a_corruption(corrupt, images):
    before = images.copy()
    once, again, other = corrupt(images, random(5)), corrupt(images, random(5)), corrupt(images, random(6))
    assert once.shape == images.shape
    assert once.dtype == np.uint8
    np.testing.assert_array_equal(images, before)
    np.testing.assert_array_equal(once, again)
    assert all((a != b).any() for a, b in zip(once, images, strict=True))
    return (once != other).any()


@pytest.mark.parametrize("name", MNIST_C)
def test_a_corruption_of_digits_keeps_the_shape_and_follows_its_seed(name):
    varies = assert_is_a_corruption(MNIST_C[name], digits())
    assert varies == (name not in ("scale", "brightness", "stripe", "canny_edges"))


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", ALL_CIFAR)
def test_a_corruption_of_photos_keeps_the_shape_and_follows_its_seed(name, severity):
    varies = assert_is_a_corruption(lambda x, generator: corrupt_photos(name, x, severity, generator), photos())
    fixed = "defocus_blur zoom_blur brightness contrast pixelate jpeg_compression gaussian_blur saturate"
    assert varies == (name not in fixed.split())


def test_the_published_lists_have_fifteen_corruptions_and_four_more():
    assert (len(MNIST_C), len(CIFAR10_C), len(CIFAR10_C_EXTRA)) == (15, 15, 4)


@pytest.mark.parametrize("severity", [0, 6])
def test_there_are_five_severities(severity):
    with pytest.raises(ValueError, match="choose one of 1 to 5"):
        cifar.contrast(photos(), severity, random())


# digits, against what one can work out by hand


def test_stripe_inverts_the_outer_quarters():
    out = mnist.stripe(blank(40, side=28), random())
    assert (out[:, :, :7] == 215).all()
    assert (out[:, :, 21:] == 215).all()
    assert (out[:, :, 7:21] == 40).all()


def test_translate_moves_by_three_along_both_axes_in_four_directions():
    images = blank(n=64, side=28)
    images[:, 10, 15] = 200
    number, row, col = np.nonzero(mnist.translate(images, random()))
    assert list(number) == list(range(64))
    assert set(zip(row, col, strict=True)) == {(7, 12), (7, 18), (13, 12), (13, 18)}


def test_translate_pushes_out_what_is_near_the_border():
    out = mnist.translate(blank(255, n=8, side=28), random())
    assert ((out == 255).sum((1, 2)) == 25 * 25).all()


def test_brightness_of_digits_adds_half_of_the_range():
    images = np.array([0, 51, 102, 128, 255], np.uint8).repeat(28 * 28).reshape(5, 28, 28)
    expected = np.array([127.5, 178.5, 229.5, 255, 255])[:, None, None]
    assert (abs(mnist.brightness(images, random()) - expected) <= 0.5).all()


def test_shot_noise_of_digits_has_four_levels():
    assert set(np.unique(mnist.shot_noise(digits(100), random()))) == {0, 85, 170, 255}


def test_impulse_noise_hits_one_digit_pixel_in_six():
    out = mnist.impulse_noise(blank(100, n=100, side=28), random())
    assert (out == 0).mean() == pytest.approx(0.085, rel=0.05)
    assert (out == 255).mean() == pytest.approx(0.085, rel=0.05)
    assert set(np.unique(out)) == {0, 100, 255}


def centroids(images):
    x = images.astype(float)
    row, col = np.mgrid[:28, :28] - 13.5
    return np.stack([(x * part).sum((1, 2)) / x.sum((1, 2)) for part in (col, row)], -1)


def spot(row, col):
    """A small spot, so and so far from the centre."""
    images = blank(n=16, side=28)
    images[:, 13 + row : 15 + row, 13 + col : 15 + col] = 255
    return images


def assert_goes_to(found, places):
    apart = np.linalg.norm(found[:, None] - np.array(places), axis=-1)
    assert (apart.min(1) < 0.1).all()
    assert set(apart.argmin(1)) == set(range(len(places)))


def test_rotate_turns_to_both_sides():
    x, y = 9 * np.cos(0.4), 9 * np.sin(0.4)
    assert_goes_to(centroids(mnist.rotate(spot(0, 9), random())), [(x, y), (x, -y)])


def test_shear_goes_to_both_sides_and_stretches():
    x, y = 9 * np.tan(0.4), 9 / np.cos(0.4)
    assert_goes_to(centroids(mnist.shear(spot(9, 0), random())), [(x, y), (-x, y)])
    assert_goes_to(centroids(mnist.shear(spot(0, 9), random())), [(9, 0)])


def test_scale_shrinks_to_seventy_percent():
    out = mnist.scale(blank(255, n=1, side=28), random())[0]
    assert (out[5:23, 5:23] == 255).all()
    assert not out[:4].any()
    assert not out[:, 24:].any()
    assert_goes_to(centroids(mnist.scale(spot(0, 10), random())), [(7, 0)])


def test_glass_blur_of_digits_swaps_and_loses_no_pixel(monkeypatch):
    monkeypatch.setattr(mnist, "gaussian", lambda x, *_, **__: x)
    images = random().integers(0, 256, (6, 28, 28), dtype=np.uint8)
    out = mnist.glass_blur(images, random())
    assert (out != images).mean() > 0.5
    np.testing.assert_array_equal(np.sort(out.reshape(6, -1)), np.sort(images.reshape(6, -1)))


def test_glass_blur_of_digits_blurs_down_but_not_across(monkeypatch):
    monkeypatch.setattr(mnist, "glass_moves", lambda *_: ())
    images = blank(side=28)
    images[:, 14, 14] = 255
    out = mnist.glass_blur(images, random())
    assert out[0, 12:17, 14].all()
    assert set(np.nonzero(out)[2]) == {14}


def test_dotted_line_draws_two_columns_of_four():
    out = mnist.dotted_line(blank(n=50, side=28), random()).any((0, 1))
    assert [c for c in range(28) if out[c]] == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26]


def test_a_line_is_bright_in_the_middle_and_ends_where_it_should():
    line = mnist._line((np.array([4.0]), np.array([10.0])), (np.array([20.0]), np.array([18.0])))[0]
    assert line[11, 6] == 1
    assert line[12, 6] == pytest.approx(1 + np.log(1 - 1 / 2.3))
    assert line[13, 6] == 0
    assert not line[:, :4].any()
    assert not line[:, 20:].any()


def test_zigzag_stays_between_the_borders():
    out = mnist.zigzag(blank(n=100, side=28), random())
    assert not out[:, :, [0, 1, 26, 27]].any()
    assert out[:, :, 2:25].any((0, 1)).all()


def test_zigzag_has_a_tooth_every_four_columns():
    class Level:
        """Draws row 14 and no lean."""

        def integers(self, low, high, size):
            return np.full(size, 14 if low == 0 else 0)

    out = mnist.zigzag(blank(n=1, side=28), Level())[0]
    assert (out[[16, 12, 16, 12, 16, 12], [4, 8, 12, 16, 20, 24]] == 255).all()
    assert (out[14, [2, 6, 10, 14, 18, 22]] == 255).all()
    assert not out[:11].any()
    assert not out[18:].any()


def test_canny_edges_draws_the_outline_of_a_square():
    images = blank(n=1, side=28)
    images[:, 8:20, 8:20] = 255
    out = mnist.canny_edges(images, random())[0]
    assert set(np.unique(out)) == {0, 255}
    assert not out[11:17, 11:17].any()
    assert out[11:17].any(1).all()
    assert not out[:6].any()


def test_fog_leaves_a_black_digit_black():
    assert not mnist.fog(blank(n=1, side=28), random()).any()


# photos, against what one can work out by hand


def test_contrast_halves_the_distance_to_the_mean():
    images = blank()
    images[:, :16] = 200
    out = cifar.contrast(images, 2, random()).astype(int)
    assert (abs(out[:, :16] - 150) <= 1).all()
    assert (abs(out[:, 16:] - 50) <= 1).all()


def test_brightness_of_photos_raises_the_value_and_cuts_the_fraction():
    assert (cifar.brightness(blank(100), 2, random()) == 125).all()


def test_saturate_leaves_grey_alone():
    np.testing.assert_array_equal(cifar.saturate(blank(100), 3, random()), blank(100))


def test_defocus_blur_makes_a_disk_of_a_point():
    images = blank()
    images[:, 16, 16] = 255
    plus, box = cifar.defocus_blur(images, 4, random()), cifar.defocus_blur(images, 5, random())
    assert (plus[0, ..., 0] >= 50).sum() == 5
    assert (box[0, 15:18, 15:18] == 28).all()
    assert box[0].any(-1).sum() == 9


def test_impulse_noise_hits_channels_by_themselves():
    out = cifar.impulse_noise(blank(100, n=50), 5, random())
    assert (out != 100).mean() == pytest.approx(0.07, rel=0.05)
    assert (out != 100).all(-1).mean() < 0.002


def test_glass_blur_of_photos_copies_a_neighbour():
    images = random().integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    out = cifar.glass_blur(images, 1, random())
    np.testing.assert_array_equal(out[:, :2], images[:, :2])
    np.testing.assert_array_equal(out[:, :, :2], images[:, :, :2])
    near = np.stack([images[:, 2 - r : 32 - r, 2 - c : 32 - c] for r in (0, 1) for c in (0, 1)])
    came_from = (near == out[:, 2:, 2:]).all(-1)
    assert came_from.any(0).all()
    assert came_from.mean((1, 2, 3)) == pytest.approx([0.25] * 4, abs=0.03)


def test_elastic_transform_of_the_first_severity_keeps_lines_straight():
    images = np.broadcast_to((np.arange(32) * 7)[:, None, None], (8, 32, 32, 3)).astype(np.uint8)
    inside = cifar.elastic_transform(images, 1, random())[:, 8:24, 8:24].astype(int)
    assert abs(np.diff(inside, 2, axis=1)).max() <= 2
    assert abs(np.diff(inside, 2, axis=2)).max() <= 2
    assert abs(inside - images[:, 8:24, 8:24]).max() > 7


def test_snow_only_brightens():
    out = corrupt_photos("snow", photos(), 3)
    assert (out.astype(int) >= photos().astype(int) - 1).all()


@pytest.mark.parametrize(("severity", "expected"), [(1, 100 + 20), (3, 90 + 40), (5, 75 + 45)])
def test_frost_adds_the_picture(severity, expected):
    out = weather.frost(blank(100), severity, random(), [np.full((40, 40, 3), 100, np.uint8)])
    assert (abs(out.astype(int) - expected) <= 1).all()


def test_frost_takes_pieces_from_everywhere():
    place = np.stack(np.broadcast_arrays(np.arange(40)[:, None], np.arange(50), 0), -1).astype(np.uint8)
    out = weather.frost(blank(n=2000), 5, random(), [place] * 5)
    assert set(out[:, 0, 0, 0]) == {int(0.45 * r) for r in range(8)}
    assert set(out[:, 0, 0, 1]) == {int(0.45 * c) for c in range(18)}


def test_frost_pictures_are_shrunk_to_the_middle_of_five_pixels(frost_folder):
    pictures = weather.frost_pictures(frost_folder)
    assert [picture.shape for picture in pictures] == [(40 + i, 60, 3) for i in range(5)]
    with Image.open(frost_folder / "frost1.png") as picture:
        assert picture.getpixel((5 * 7 + 2, 5 * 3 + 2)) == tuple(pictures[0][3, 7])


def test_spatter_is_bright_water_or_dark_mud():
    drops, mud = (cifar.spatter(blank(100, n=20), severity, random()).astype(int) for severity in (3, 5))
    assert drops.min() >= 99
    assert (drops > 110).any()
    assert mud.max() <= 100
    assert mud.min() >= 20


@pytest.mark.parametrize(
    "name", ["gaussian_blur", "defocus_blur", "zoom_blur", "motion_blur", "glass_blur", "pixelate"]
)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_an_even_surface_stays_even(name, severity):
    images = np.arange(0, 256, 15, dtype=np.uint8)[:, None, None, None] * np.ones((1, 32, 32, 3), np.uint8)
    out = corrupt_photos(name, images, severity).astype(int)
    assert (abs(out - images) <= 1).all()
    assert (out == out[:, :1, :1]).all() or name == "glass_blur"


# the building blocks, against slow twins


def test_motion_blur_agrees_with_its_definition():
    images, radius, sigma = random().integers(0, 256, (3, 9, 9), dtype=np.uint8), 3, 2.0
    degrees = np.array([-45.0, 20.0, -100.0])
    weights = np.exp(-(np.arange(7) ** 2) / (2 * sigma**2))
    expected = np.zeros(images.shape)
    for n, t in enumerate(np.deg2rad(degrees)):
        for r in range(9):
            for c in range(9):
                for i, weight in enumerate(weights / weights.sum()):
                    row, col = r + int(np.ceil(i * np.sin(t) - 0.5)), c + int(np.ceil(i * np.cos(t) - 0.5))
                    expected[n, r, c] += weight * images[n, min(max(row, 0), 8), min(max(col, 0), 8)]
    np.testing.assert_array_equal(blocks.motion_blur(images, radius, sigma, degrees), np.floor(expected + 1e-6))


def slow_plasma(side, decay, generator):
    heights, step, wobble = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half, cells = step // 2, side // step
        jitter = wobble * generator.uniform(-wobble, wobble, (3, 1, cells, cells))[:, 0]
        grid = [(r, c) for r in range(0, side, step) for c in range(0, side, step)]

        def at(r, c):
            return heights[r % side, c % side]

        def around(r, c, far, pairs, heights=heights, at=at):
            return sum(at(r + far * i, c + far * j) for i, j in pairs) / 4

        straight, diagonal = [(0, 1), (0, -1), (1, 0), (-1, 0)], [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        for kind, (down, right, pairs) in enumerate([(half, half, diagonal), (0, half, straight), (half, 0, straight)]):
            for r, c in grid:
                wave = jitter[kind, r // step, c // step]
                heights[r + down, c + right] = around(r + down, c + right, half, pairs) + wave
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return heights / heights.max()


def test_plasma_agrees_with_its_definition():
    np.testing.assert_allclose(blocks.plasma(1, 16, 1.7, random())[0], slow_plasma(16, 1.7, random()), atol=1e-12)


def test_plasma_makes_a_map_from_0_to_1_for_each_image():
    clouds = blocks.plasma(5, 32, 2, random())
    assert (clouds.min((1, 2)) == 0).all()
    assert (clouds.max((1, 2)) == 1).all()
    assert not np.allclose(clouds[0], clouds[1])


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.25, float(np.arange(1, 1.26, 0.01)[25]), 2.25])
def test_clipped_zoom_agrees_with_scipy(factor):
    from scipy.ndimage import zoom

    images = random().random((2, 32, 32, 3))
    crop = int(np.ceil(32 / factor))
    start = (32 - crop) // 2
    middle = images[:, start : start + crop, start : start + crop]
    large = np.stack([zoom(image, (factor, factor, 1), order=1) for image in middle])
    trim = (large.shape[1] - 32) // 2
    expected = large[:, trim : trim + 32, trim : trim + 32]
    np.testing.assert_allclose(blocks.clipped_zoom(images, factor), expected, atol=1e-12)
    np.testing.assert_allclose(blocks.clipped_zoom(images[..., 0], factor), expected[..., 0], atol=1e-12)


@pytest.mark.parametrize(
    ("fold", "mode"), [(blocks.mirror, "mirror"), (blocks.reflect, "reflect"), (blocks.clamp, "nearest")]
)
def test_sampling_agrees_with_scipy(fold, mode):
    from scipy.ndimage import map_coordinates

    images, (rows, cols) = random().random((3, 9, 9)), random(1).uniform(-20, 30, (2, 3, 9, 9))
    found = blocks.sample(images, rows, cols, fold)
    for image, row, col, out in zip(images, rows, cols, found, strict=True):
        np.testing.assert_allclose(out, map_coordinates(image, [row, col], order=1, mode=mode), atol=1e-12)


def test_correlation_agrees_with_scipy():
    from scipy.ndimage import correlate

    images, kernel = random().random((2, 9, 9, 3)), random().random((5, 5))
    np.testing.assert_allclose(
        blocks.correlate(images, kernel), correlate(images, kernel[None, :, :, None], mode="mirror"), atol=1e-12
    )


def test_distance_is_the_shortest_way_by_the_moves_of_king_and_knight():
    marked = np.zeros((1, 32, 32), bool)
    marked[0, 3, 4] = True
    row, col = abs(np.mgrid[:32, :32] - np.array([3, 4])[:, None, None])
    long, short = np.maximum(row, col), np.minimum(row, col)
    by_knight = 2.1969 * short + (long - 2 * short)
    by_king = 2.1969 * (long - short) + 1.4 * (2 * short - long)
    expected = np.minimum(np.where(2 * short <= long, by_knight, by_king), 20)
    np.testing.assert_allclose(water.distance(marked)[0], expected, atol=1e-9)


def test_equalizing_spreads_the_levels_over_the_range():
    image = np.array([[[3, 3, 5, 5], [5, 5, 9, 9]]], np.uint8)
    np.testing.assert_array_equal(water.equalize(image), [[[0, 0, 170, 170], [170, 170, 255, 255]]])
    np.testing.assert_array_equal(water.equalize(blank(7, side=28)), blank(7, side=28))


def test_without_a_drop_the_photo_stays_dry():
    assert not water.drops(blank(side=28)).any()


# the files


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


# the real data, against what the published programs gave when they were run on it once

MNIST_STATISTICS = """
shot_noise 10.91/25.60/69.19
impulse_noise 21.67/47.59/94.25
glass_blur 19.30/31.03/60.40
motion_blur 24.56/30.90/56.80
shear 28.25/33.77/73.39
scale 27.84/15.27/52.19
rotate 28.02/31.17/71.18
brightness 115.73/146.91/43.54
translate 46.30/31.03/75.96
stripe 126.19/154.28/119.79
fog 91.79/104.14/42.09
spatter 8.35/35.28/72.10
dotted_line 6.07/37.25/81.14
zigzag 12.22/43.39/86.24
canny_edges 41.06/27.24/78.77
"""
"""On the first 1000 test digits: mean absolute change, mean, standard deviation."""

CIFAR_STATISTICS = """
gaussian_noise 7.98/123.0/65.3 11.88/122.9/65.9 15.71/122.9/66.8 17.61/122.9/67.3 19.46/122.9/67.9
shot_noise 5.95/122.9/65.0 8.37/122.8/65.3 13.10/122.6/66.2 15.07/122.5/66.7 18.31/122.2/67.6
impulse_noise 1.24/123.5/65.7 2.53/123.6/66.7 3.83/123.6/67.6 6.38/123.7/69.3 8.90/123.8/71.0
defocus_blur 1.38/123.0/64.1 3.32/123.0/63.1 5.00/123.0/62.4 6.51/123.0/61.9 9.27/123.0/60.7
glass_blur 11.16/123.8/65.0 11.33/122.8/64.7 11.11/122.8/63.4 18.20/123.1/64.9 17.43/123.1/63.5
motion_blur 7.03/123.0/63.1 10.48/122.9/62.1 13.18/122.9/61.2 13.14/123.0/61.2 15.22/122.8/60.4
zoom_blur 8.80/123.0/62.6 10.34/122.7/62.1 12.34/122.6/61.5 14.40/122.4/61.0 16.38/122.2/60.4
snow 10.63/134.1/65.6 23.59/147.1/65.5 25.03/148.5/65.8 36.71/160.2/65.1 51.44/174.9/62.8
frost 30.79/154.3/62.5 44.41/167.9/60.4 48.35/171.8/57.2 44.69/167.7/54.8 42.82/164.3/52.1
fog 10.97/122.3/54.3 21.63/121.7/45.6 27.80/122.1/41.8 32.32/121.3/40.5 39.17/121.3/39.7
brightness 10.02/133.5/65.2 20.23/143.7/65.0 29.98/153.5/64.4 39.17/162.7/63.4 55.54/179.0/60.5
contrast 10.80/123.0/54.0 21.59/123.0/44.7 25.91/123.0/41.7 30.23/123.0/39.1 36.71/123.0/36.5
elastic_transform 21.58/123.0/63.3 19.73/122.7/63.1 18.08/123.1/62.6 16.54/123.0/62.3 13.55/123.0/62.3
pixelate 1.80/123.6/64.5 3.38/123.6/64.3 4.16/123.6/64.1 6.22/123.7/63.7 8.62/123.9/63.2
jpeg_compression 5.30/123.5/64.5 6.56/123.5/64.4 7.00/123.5/64.4 7.46/123.5/64.3 8.07/123.5/64.2
speckle_noise 5.75/122.8/65.0 9.43/122.6/65.3 11.25/122.4/65.6 14.83/122.0/66.4 18.33/121.6/67.3
gaussian_blur 1.34/123.0/64.1 4.91/123.0/62.3 6.27/123.0/61.7 7.44/123.0/61.1 9.46/123.0/59.9
spatter 1.02/124.5/65.1 2.72/126.2/65.6 6.69/130.2/66.2 3.15/120.5/65.1 5.19/118.6/65.2
saturate 11.45/134.9/62.8 14.79/138.3/63.1 7.98/115.5/68.1 20.35/103.1/69.6 29.78/93.7/70.6
"""
"""On the first 500 test images, severities 1 to 5: the same three."""


def rows(table):
    return [(name, cells) for name, *cells in map(str.split, table.strip().splitlines())]


def real(name):
    path = Path(os.environ.get("PATHPROX_DATA", "")) / name
    if "PATHPROX_DATA" not in os.environ or not path.exists():
        pytest.skip(f"set PATHPROX_DATA to a folder with {name}")
    return path


def assert_has_statistics(corrupt, images, cell, rel=0.03):
    """Within what is printed, or, where there are draws, near it: the mean of several seeds against one of theirs."""
    outs = [corrupt(images, random(seed)).astype(float) for seed in range(4)]
    found = np.mean([(abs(out - images).mean(), out.mean(), out.std()) for out in outs], axis=0)
    drawn = (outs[0] != outs[1]).any()
    for value, printed in zip(found, cell.split("/"), strict=True):
        digit = 10.0 ** -len(printed.split(".")[1])
        assert value == pytest.approx(float(printed), abs=max(0.01, digit / 2 + 1e-3), rel=rel if drawn else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), rows(MNIST_STATISTICS))
def test_corrupted_digits_have_the_statistics_of_the_published_program(name, cells):
    with gzip.open(real("mnist/t10k-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(16 + 1000 * 784), np.uint8, offset=16).reshape(-1, 28, 28)
    few_and_large = name in ("fog", "spatter")  # so that 1000 digits still differ by two percent from seed to seed
    assert_has_statistics(MNIST_C[name], images, cells[0], rel=0.05 if few_and_large else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), rows(CIFAR_STATISTICS))
def test_corrupted_photos_have_the_statistics_of_the_published_program(name, cells):
    records = np.fromfile(real("cifar-10-batches-bin/test_batch.bin"), np.uint8, 500 * 3073).reshape(500, 3073)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    corrupt = ALL_CIFAR[name]
    if name == "frost":
        corrupt = partial(corrupt, pictures=weather.frost_pictures(real("frost")))
    for severity, cell in zip(SEVERITIES, cells, strict=True):
        assert_has_statistics(lambda x, generator, s=severity: corrupt(x, severity=s, random=generator), images, cell)
