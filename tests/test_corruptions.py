"""The corrupted test sets: each corruption on its own, and the files made of them."""

import numpy as np
import pytest
from PIL import Image

from corrupting import ALL_CIFAR, SEVERITIES, blank, corrupt_photos, digits, photos, random
from pathprox.experiments.corruptions import (
    CIFAR10_C,
    CIFAR10_C_EXTRA,
    MNIST_C,
    cifar,
    mnist,
    weather,
)

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
