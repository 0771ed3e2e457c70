from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from cflat.data import INPUTS, eval_transform, train_transform
from cflat.data.transforms import (
    CROP_ATTEMPTS,
    Brightness,
    Flip,
    Normalize,
    PaddedCrop,
    RandomResizedCrop,
    ResizeCrop,
    Transform,
    crop_boxes,
    resample,
)

ALL_INPUTS = ["cifar", "imagenet", "none", "paper", "pilot", "timm"]


def noise(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def uniform(*shape, seed=1):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive_box(height, width, draws, scale, ratio):
    """Torchvision's rule, one image and one attempt at a time."""
    areas, aspects, (place_y, place_x) = draws[:CROP_ATTEMPTS], draws[CROP_ATTEMPTS:-2], draws[-2:]
    for area_draw, aspect_draw in zip(areas, aspects, strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * aspect_draw)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [int(place_y * (height - h + 1)), int(place_x * (width - w + 1)), h, w]
    if width / height < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        w, h = round(height * ratio[1]), height
    else:
        w, h = width, height
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize("shape", [(32, 32), (40, 97), (97, 40), (7, 300), (300, 7), (1, 1)])
@pytest.mark.parametrize("scale", [(0.05, 1.0), (0.9, 1.0)])
def test_crop_boxes_equal_the_loop(shape, scale):
    draws = uniform(200, 2 * CROP_ATTEMPTS + 2)
    boxes = crop_boxes(torch.tensor([shape] * 200), draws, scale, (3 / 4, 4 / 3))
    assert boxes.tolist() == [naive_box(*shape, row, scale, (3 / 4, 4 / 3)) for row in draws.tolist()]


def test_crop_boxes_stay_inside_for_extreme_draws():
    edge = 1 - 2**-53
    draws = torch.tensor([[0.0] * 22, [edge] * 22], dtype=torch.float64)
    for shape in [(32, 32), (5, 9), (1, 1)]:
        top, left, height, width = crop_boxes(torch.tensor([shape] * 2), draws, (0.05, 1.0), (0.75, 4 / 3)).T
        assert (height >= 1).all()
        assert (width >= 1).all()
        assert (top >= 0).all()
        assert (top + height <= shape[0]).all()
        assert (left + width <= shape[1]).all()


@pytest.mark.parametrize("size", [8, 32, 112])  # shrinking (antialiased), mixed, enlarging
def test_resample_equals_torchvision_crop_by_crop(size):
    images = noise(24, 3, 32, 40).double() / 255
    boxes = crop_boxes(torch.tensor([[32, 40]] * 24), uniform(24, 22), (0.05, 1.0), (3 / 4, 4 / 3))
    expected = torch.stack(
        [
            tv.resized_crop(image, *box, size=[size, size], antialias=True)
            for image, box in zip(images, boxes.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(resample(images, boxes, size), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pixels", [noise(6, 3, 32, 32), noise(6, 3, 80, 90)], ids=["dense", "one by one"])
def test_random_resized_crop_equals_torchvision_up_to_rounding(pixels):
    crop = RandomResizedCrop(24, scale=(0.05, 1.0))
    draws = uniform(6, crop.num_draws)
    for image, draw, result in zip(pixels, draws, crop(pixels, draws), strict=True):
        box = naive_box(*image.shape[-2:], draw.tolist(), crop.scale, crop.ratio)
        expected = tv.resized_crop(image.float() / 255, *box, size=[24, 24], antialias=True)
        torch.testing.assert_close(result, expected, atol=1.01 / 255, rtol=0)


def test_padded_crop_equals_the_loop():
    pixels = noise(40, 3, 16, 16)
    draws = uniform(40, 2)
    results = PaddedCrop(16, padding=2)(pixels, draws)
    corners = set()
    for image, draw, result in zip(pixels, draws.tolist(), results, strict=True):
        top, left = (int(value * 5) for value in draw)
        corners.add((top, left))
        padded = torch.zeros(3, 20, 20, dtype=torch.uint8)
        padded[:, 2:18, 2:18] = image
        assert torch.equal(result, padded[:, top : top + 16, left : left + 16].float() / 255)
    assert {top for top, _ in corners} == {left for _, left in corners} == set(range(5))


def test_flip_and_brightness_equal_the_loop():
    images = noise(30, 3, 5, 5).float() / 255
    draws = uniform(30, 1)
    flipped, brighter = Flip()(images, draws), Brightness(0.4)(images, draws)
    for index, value in enumerate(draws[:, 0].tolist()):
        assert torch.equal(flipped[index], images[index].flip(-1) if value < 0.5 else images[index])
        factor = 1 - 0.4 + 0.8 * value
        torch.testing.assert_close(brighter[index], (images[index] * factor).clamp(0, 1))
    assert 0 < (draws < 0.5).sum() < 30


def test_resize_crop_equals_torchvision_for_equal_and_mixed_sizes():
    stage = ResizeCrop(20, 16)
    mixed = [noise(3, 30, 40), noise(3, 24, 18), noise(3, 20, 20)]
    results = stage(mixed, torch.empty(3, 0))
    for image, result in zip(mixed, results, strict=True):
        resized = tv.resize(image, [20], interpolation=InterpolationMode.BICUBIC, antialias=True)
        assert torch.equal(result, tv.center_crop(resized, [16]).float() / 255)
    same = noise(4, 3, 30, 40)
    assert torch.equal(stage(same, torch.empty(4, 0)), stage(list(same), torch.empty(4, 0)))


@pytest.mark.parametrize("preset", ALL_INPUTS)
@pytest.mark.parametrize("mode", [train_transform, eval_transform])
def test_an_image_is_transformed_alike_alone_and_in_a_batch(preset, mode):
    transform = mode(preset, 16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    for pixels in (noise(5, 3, 16, 16), noise(5, 3, 40, 30), [noise(3, 16 + i, 20) for i in range(5)]):
        draws = uniform(5, transform.num_draws)
        batch = transform.apply(pixels, draws)
        alone = torch.cat([transform.apply(pixels[i][None], draws[i : i + 1]) for i in range(5)])
        assert batch.shape == (5, 3, 16, 16)
        assert batch.dtype == torch.float32
        torch.testing.assert_close(batch, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("preset", ALL_INPUTS)
def test_only_training_is_random(preset):
    mean = std = (0.5, 0.5, 0.5)
    assert eval_transform(preset, 32, mean, std).num_draws == 0
    assert (train_transform(preset, 32, mean, std).num_draws > 0) == (preset != "none")


def test_randomness_comes_from_the_generator_alone():
    transform = train_transform("pilot", 16)
    pixels = noise(4, 3, 32, 32)
    results = []
    for seed in (3, 3, 4):
        torch.rand(7)  # the global generator moves on, without effect
        results.append(transform(pixels, torch.Generator().manual_seed(seed)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    with pytest.raises(ValueError, match="needs a generator"):
        transform(pixels)


def test_pixels_are_not_written_to():
    for preset in ALL_INPUTS:
        pixels = noise(4, 3, 16, 16)
        before = pixels.clone()
        transform = train_transform(preset, 16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        transform(pixels, torch.Generator().manual_seed(0))
        assert torch.equal(pixels, before)


def test_paper_inputs_stay_in_the_unit_range():
    for preset in ("paper", "pilot", "none"):
        images = train_transform(preset, 24)(noise(8, 3, 32, 32), torch.Generator().manual_seed(0))
        assert images.min() >= 0
        assert images.max() <= 1 + 1e-6


def test_paper_evaluation_scales_256_over_224_with_the_image_size():
    for size, resize in ((224, 256), (112, 128), (96, 109), (32, 36)):
        (stage,) = eval_transform("paper", size).stages
        assert stage == ResizeCrop(resize, size, "bicubic")
    crop, _ = train_transform("paper", 224).stages
    assert crop == RandomResizedCrop(224, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3))


def test_timm_normalises_with_the_statistics_of_the_backbone():
    pixels = noise(2, 3, 32, 32)
    plain = eval_transform("pilot", 32)(pixels)
    normalised = eval_transform("timm", 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))(pixels)
    torch.testing.assert_close(normalised, plain * 2 - 1)
    with pytest.raises(ValueError, match="'timm' need the mean and std"):
        eval_transform("timm", 32)


def test_cifar_normalises_with_cifar_statistics_whatever_the_backbone_says():
    stages = train_transform("cifar", 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).stages
    assert stages == (
        PaddedCrop(32, 4),
        Flip(),
        Brightness(63 / 255),
        Normalize((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    )


def test_digits_size_is_kept_or_resized():
    pixels = noise(3, 3, 8, 8)
    assert torch.equal(eval_transform("none", 8)(pixels), pixels.float() / 255)
    assert eval_transform("none", 32)(pixels).shape == (3, 3, 32, 32)


def test_every_preset_is_described_and_wrong_ones_are_named():
    assert INPUTS.names() == [*ALL_INPUTS, "vectors"]  # which are no images, and are tested as features
    assert all(INPUTS[name].description for name in INPUTS)
    with pytest.raises(ValueError, match=r"Unknown kind of inputs 'cifer'. Did you mean 'cifar'"):
        train_transform("cifer", 32)
    with pytest.raises(ValueError, match="image_size must be"):
        eval_transform("none", 0)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.5, 0.5)), ((0, 0, 0), (1, 1, 0))])
def test_wrong_statistics_are_refused(mean, std):
    with pytest.raises(ValueError, match="must"):
        Normalize(mean, std)


def test_stages_get_their_own_draws():
    pixels = noise(3, 3, 16, 16)
    draws = uniform(3, 4)
    whole = Transform((PaddedCrop(16, 2), Flip(), Brightness(0.3))).apply(pixels, draws)
    steps = Brightness(0.3)(Flip()(PaddedCrop(16, 2)(pixels, draws[:, :2]), draws[:, 2:3]), draws[:, 3:])
    assert torch.equal(whole, steps)
