"""What a TPU slice is: chips, hosts, and what each tool calls it.

A slice is written as the Cloud TPU API does (`v6e-16`, `v5p-32`, `v5litepod-16`) or by its shape (`v5p:2x2x4`). The number
in the first form counts TensorCores for v4 and v5p, two a chip, and chips for v5e and v6e.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

__all__ = ["GENERATIONS", "Generation", "Slice", "parse_slice"]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of TPU.

    Attributes:
      api: what comes before the number in the accelerator type of the Cloud TPU API.
      gke: value of the node label cloud.google.com/gke-tpu-accelerator.
      runtime: software of a TPU VM, `--runtime-version`.
      cores: what the number in an accelerator type counts, per chip.
      shapes: accelerator number -> shape that the API takes for it.
      largest: chips of the largest slice.
      ray: what Ray calls it.
    """

    api: str
    gke: str
    runtime: str
    cores: int
    shapes: Mapping[int, str]
    largest: int
    ray: str

    @property
    def dimensions(self) -> int:
        """Of the network of chips."""
        return next(iter(self.shapes.values())).count("x") + 1


_PLANE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
    2048: "8x8x16",
    4096: "8x16x16",
}
GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation("v4", "tpu-v4-podslice", "tpu-ubuntu2204-base", 2, _CUBE, 4096, "TPU-V4"),
    "v5e": Generation(
        "v5litepod", "tpu-v5-lite-podslice", "v2-alpha-tpuv5-lite", 1, _PLANE, 256, "TPU-V5LITEPOD"
    ),
    "v5p": Generation(
        "v5p",
        "tpu-v5p-slice",
        "v2-alpha-tpuv5",
        2,
        {**_CUBE, 8192: "16x16x16", 12288: "16x16x24"},
        6144,
        "TPU-V5P",
    ),
    "v6e": Generation("v6e", "tpu-v6e-slice", "v2-alpha-tpuv6e", 1, _PLANE, 256, "TPU-V6E"),
}
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclasses.dataclass(frozen=True)
class Slice:
    """One slice.

    Attributes:
      generation: key of `GENERATIONS`.
      shape: chips along each axis, "4x4" or "2x2x4".
      chips_per_host: chips that one host (TPU VM) holds.
    """

    generation: str
    shape: str
    chips_per_host: int

    @property
    def kind(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        return _chips(self.shape)

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def accelerator(self) -> str:
        """Accelerator type of the Cloud TPU API, `v5litepod-16`."""
        return f"{self.kind.api}-{self.chips * self.kind.cores}"

    @property
    def usual(self) -> bool:
        """Whether the accelerator type alone says the shape."""
        return self.kind.shapes.get(self.chips * self.kind.cores) == self.shape

    def __str__(self) -> str:
        return self.accelerator if self.usual else f"{self.generation}:{self.shape}"


def parse_slice(text: str, *, chips_per_host: int | None = None) -> Slice:
    """A slice from `v6e-16`, `v5litepod-16`, `v5e-16`, `v5p:2x2x4`.

    Args:
      text: as above.
      chips_per_host: 4 or 8 where eight chips are offered as one host or as two; None: as the Cloud TPU API has it (one
        host of 8).

    Raises:
      ValueError: there is no such slice; the message lists those that there are.
    """
    found = re.fullmatch(
        r"(?P<name>[a-z0-9]+)(?:-(?P<number>[0-9]{1,9})|:(?P<shape>[0-9]{1,9}(?:x[0-9]{1,9}){1,2}))",
        text.strip().lower(),
    )
    names = {kind.api: name for name, kind in GENERATIONS.items()} | {name: name for name in GENERATIONS}
    if found is None or found["name"] not in names:
        raise ValueError(
            f"{text!r} is not a TPU slice. Write an accelerator type, such as v6e-16, or a generation and a shape, such as "
            f"v5p:2x2x4; generations: {', '.join(GENERATIONS)}. (Later generations are not in the Cloud TPU API.)"
        )
    name = names[found["name"]]
    kind = GENERATIONS[name]
    if found["number"] is not None:
        number = int(found["number"])
        if number not in kind.shapes:
            raise ValueError(
                f"there is no {text}. Accelerator types of {name}: "
                f"{', '.join(f'{kind.api}-{n} ({shape})' for n, shape in kind.shapes.items())}."
                + (f" For another shape write it, such as {name}:4x4x12." if kind.dimensions == 3 else "")
            )
        shape = kind.shapes[number]
    else:
        shape = _checked_shape(name, kind, found["shape"])
    chips = _chips(shape)
    usual = chips if chips <= 8 and kind.dimensions == 2 else 4
    if chips_per_host is None:
        chips_per_host = usual
    if chips_per_host != usual and not (chips == 8 and kind.dimensions == 2 and chips_per_host == 4):
        allowed = "4 or 8" if chips == 8 and kind.dimensions == 2 else str(usual)
        raise ValueError(f"{text}: {chips_per_host} chips per host were given; a host of it holds {allowed}.")
    return Slice(name, shape, chips_per_host)


def _chips(shape: str) -> int:
    return math.prod(int(axis) for axis in shape.split("x"))


def _checked_shape(name: str, kind: Generation, shape: str) -> str:
    """The shape, if the generation has it: a small one of the table, or up to `largest` chips with axes that grow."""
    axes = [int(axis) for axis in shape.split("x")]
    shape = "x".join(map(str, axes))  # 04x4x4
    if kind.dimensions == 2:
        if shape in kind.shapes.values():
            return shape
        raise ValueError(f"{name} has no slice of shape {shape}; it has {', '.join(kind.shapes.values())}.")
    regular = len(axes) == 3 and all(axis >= 4 and axis % 4 == 0 for axis in axes) and axes == sorted(axes)
    if shape in _SMALL_CUBES or (regular and math.prod(axes) <= kind.largest):
        return shape
    raise ValueError(
        f"{name} has no slice of shape {shape}; it has {', '.join(_SMALL_CUBES)}, and AxBxC of multiples of 4 with "
        f"A <= B <= C and at most {kind.largest} chips."
    )
