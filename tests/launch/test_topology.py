"""Slices: what each tool calls them, and what is refused."""

import pytest

from launch.topology import GENERATIONS, Slice, parse_slice


@pytest.mark.parametrize(
    ("text", "shape", "chips", "hosts", "accelerator", "gke"),
    [
        ("v4-8", "2x2x1", 4, 1, "v4-8", "tpu-v4-podslice"),
        ("v4-512", "4x8x8", 256, 64, "v4-512", "tpu-v4-podslice"),
        ("v5litepod-1", "1x1", 1, 1, "v5litepod-1", "tpu-v5-lite-podslice"),
        ("v5e-8", "2x4", 8, 1, "v5litepod-8", "tpu-v5-lite-podslice"),
        ("v5litepod-16", "4x4", 16, 4, "v5litepod-16", "tpu-v5-lite-podslice"),
        ("v5e:16x16", "16x16", 256, 64, "v5litepod-256", "tpu-v5-lite-podslice"),
        ("v5p-32", "2x2x4", 16, 4, "v5p-32", "tpu-v5p-slice"),
        ("V5P:4x4x4", "4x4x4", 64, 16, "v5p-128", "tpu-v5p-slice"),
        ("v5p:4x4x12", "4x4x12", 192, 48, "v5p-384", "tpu-v5p-slice"),
        ("v5p-12288", "16x16x24", 6144, 1536, "v5p-12288", "tpu-v5p-slice"),
        ("v6e-4", "2x2", 4, 1, "v6e-4", "tpu-v6e-slice"),
        ("v6e-256", "16x16", 256, 64, "v6e-256", "tpu-v6e-slice"),
    ],
)
def test_a_slice(text, shape, chips, hosts, accelerator, gke):
    found = parse_slice(text)
    assert (found.shape, found.chips, found.hosts) == (shape, chips, hosts)
    assert (found.accelerator, found.kind.gke) == (accelerator, gke)


def test_every_entry_of_the_table_is_as_large_as_its_number_says():
    for name, kind in GENERATIONS.items():
        for number, shape in kind.shapes.items():
            found = parse_slice(f"{kind.api}-{number}")
            assert found == parse_slice(f"{name}:{shape}")
            assert found.chips * kind.cores == number
            assert found.usual and str(found) == f"{kind.api}-{number}"
            assert found.hosts * found.chips_per_host == found.chips <= kind.largest


def test_eight_chips_as_one_host_or_as_two():
    assert parse_slice("v6e-8") == Slice("v6e", "2x4", 8)
    assert parse_slice("v6e-8", chips_per_host=4).hosts == 2


def test_an_unusual_shape_is_called_by_it():
    found = parse_slice("v4:4x4x12")
    assert not found.usual and str(found) == "v4:4x4x12"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v6e-12", r"there is no v6e-12. .*v6e-8 \(2x4\), v6e-16 \(4x4\)"),
        ("v5p-24", r"there is no v5p-24.*v5p-32 \(2x2x4\).*For another shape write it"),
        ("v5e-512", "there is no v5e-512"),
        ("tpu7x-8", "'tpu7x-8' is not a TPU slice.*generations: v4, v5e, v5p, v6e"),
        ("h100", "is not a TPU slice"),
        ("v6e:3x4", "v6e has no slice of shape 3x4; it has 1x1, 2x2, 2x4, 4x4"),
        ("v6e:4x4x4", "v6e has no slice of shape 4x4x4"),
        ("v5p:4x4", "v5p has no slice of shape 4x4; it has 2x2x1"),
        ("v5p:4x8x4", "multiples of 4 with A <= B <= C"),
        ("v5p:4x4x6", "multiples of 4"),
        ("v4:16x16x20", "at most 4096 chips"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(text, message):
    with pytest.raises(ValueError, match=message):
        parse_slice(text)


@pytest.mark.parametrize(("text", "given"), [("v6e-16", 8), ("v5p-8", 8), ("v6e-8", 2), ("v6e-4", 1)])
def test_chips_that_no_host_has(text, given):
    with pytest.raises(ValueError, match=f"{given} chips per host were given; a host of it holds"):
        parse_slice(text, chips_per_host=given)
