"""What a compiled program costs, counted from its HLO text: products, memory traffic, collectives.

XLA's own cost analysis counts the body of a loop once, and a decoder is a loop over its layers. Here a body counts as
often as it runs: the bound is the constant that the counter is compared with in the condition of the loop, and the body
says by how much the counter goes up (the loops that gather weights while they multiply take two shards a turn). Where
there is no bound (the loop ends when the data say so), `dynamic_trips` stands for it, and the loop is listed.

A custom kernel is opaque, but most say what they cost in the text (`cost_estimate` of `pallas_call`; XLA writes it for its
products of experts too): that counts. What the work of a kernel depends on the data for is its author's to assume.

All figures are those of one chip: the text is the program of one partition.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["Array", "Collective", "Cost", "cost", "replica_groups"]

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Names for values that are somewhere already, bookkeeping, and the ends of what was counted at its start.
_FREE = frozenset(
    "parameter tuple get-tuple-element bitcast constant after-all partition-id replica-id opt-barrier iota "
    "copy-done send recv send-done recv-done domain custom-call-done".split()
)
_SLICING = frozenset(("dynamic-slice", "slice", "gather"))


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of the text."""

    dtype: str
    shape: tuple[int, ...]
    fast: bool  # in the vector memory of the chip, not in HBM

    @property
    def bytes(self) -> int:
        """Without the padding of its tiles."""
        bits = _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 0)
        return -(-math.prod(self.shape) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind along the same axes, summed over the program."""

    kind: str  # all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute
    axes: tuple[str, ...]  # of the mesh; () = between devices that no axis describes
    network: str  # "ICI" within a slice, "DCN" between slices
    count: float  # how often one runs
    bytes: float  # that a chip sends


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one run of a program, on one chip."""

    flops: float  # of matrix products and convolutions, and what kernels say
    hbm_bytes: float  # read and written
    collectives: tuple[Collective, ...]
    largest: tuple[
        tuple[Array, str], ...
    ]  # arrays that the program makes in HBM, and which operation makes them
    dynamic_loops: tuple[str, ...]  # operations whose number of turns depends on the data
    kernels: tuple[str, ...]  # custom kernels
    untold: tuple[str, ...]  # those of them that do not say what they cost

    def network_bytes(self, network: str) -> float:
        """Sent over "ICI" or "DCN"."""
        return sum(c.bytes for c in self.collectives if c.network == network)


@dataclasses.dataclass
class _Instruction:
    name: str
    arrays: list[Array]
    opcode: str
    operands: list[str]
    attributes: str

    @functools.cached_property
    def where(self) -> str:
        """The operation of the source that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else self.name

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None


_Computations = dict[str, dict[str, _Instruction]]

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAMES = re.compile(r"%([\w.\-]+)")


def _arrays(text: str) -> list[Array]:
    return [
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in (layout or ""))
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype in _BITS or dtype.startswith("f8")
    ]


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise ValueError(f"HLO text: a parenthesis is not closed in {text[:80]!r}.")


def _parse(text: str) -> tuple[_Computations, str]:
    """(computations: {name: {instruction name: instruction}}, name of the entry); the root has the key "ROOT" as well."""
    computations: _Computations = {}
    entry, current = "", None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{") and "(" in line:
            found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if found is None or line.startswith("HloModule"):
                continue
            current = computations[found.group(2)] = {}
            entry = found.group(2) if found.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
                if line.lstrip().startswith("ROOT"):
                    current["ROOT"] = instruction
    if not entry:
        raise ValueError("HLO text without an entry computation.")
    return computations, entry


def _instruction(line: str) -> _Instruction | None:
    found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[found.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    body = rest[end:].lstrip()
    opens = body.index("(")
    closes = _closing(body, opens)
    inside = body[opens + 1 : closes]
    opcode = body[:opens]
    operands = [inside] if opcode in ("constant", "parameter") else _NAMES.findall(inside)
    return _Instruction(found.group(1), _arrays(rest[:end]), opcode, operands, body[closes + 1 :])


# --------------------------------------------------------------------------------------- products


def _dot_flops(i: _Instruction, shapes: Mapping[str, _Instruction]) -> float:
    lhs = shapes[i.operands[0]].arrays[0].shape
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    contracted = [int(d) for d in found.group(1).split(",") if d] if found else []
    return 2.0 * math.prod(i.arrays[0].shape) * math.prod(lhs[d] for d in contracted)


def _convolution_flops(i: _Instruction, shapes: Mapping[str, _Instruction]) -> float:
    """2 · multiplications with entries that exist; a product of matrices may be written as a convolution of any form."""
    lhs, rhs = (shapes[name].arrays[0].shape for name in i.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        raise ValueError(f"HLO text: a convolution without dim_labels: {i.name}.")
    of_lhs, of_rhs, of_out = labels.groups()
    out = i.arrays[0].shape
    spatial = [label for label in of_out if label.isdigit()]
    window = _window(i.attributes, len(spatial))
    pairs = 1
    for label in spatial:
        size, stride, low, lhs_dilate, rhs_dilate = window[int(label)]
        n = (lhs[of_lhs.index(label)] - 1) * lhs_dilate + 1
        starts = np.arange(out[of_out.index(label)]) * stride - low
        at = starts[:, None] + np.arange(size)[None] * rhs_dilate
        pairs *= int(np.count_nonzero((at >= 0) & (at < n) & (at % lhs_dilate == 0)))
    groups = re.search(r"batch_group_count=(\d+)", i.attributes)
    batch = out[of_out.index("b")] * out[of_out.index("f")]
    return 2.0 * batch * rhs[of_rhs.index("i")] * pairs / (int(groups.group(1)) if groups else 1)


def _window(attributes: str, dims: int) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, low padding, dilation of the left side, of the right side) of each spatial dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(part.split("=") for part in found.group(1).split()) if found else {}

    def numbers(name: str, default: int) -> list[int]:
        text = given.get(name)
        return [default] * dims if text is None else [int(n.split("_")[0]) for n in text.split("x")]

    fields = (("size", 1), ("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    return list(zip(*(numbers(*field) for field in fields), strict=True)) if dims else []


# ------------------------------------------------------------------------------------- collectives


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, from any of the notations of HLO text.

    Raises:
      ValueError: there are none that can be read.
    """
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{?(\d+,\d+)", pairs.group(1))]
    found = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if found:
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        moving = [n for n in re.findall(r"'([^']+)'", found.group(2)) if n in sizes]
        if math.prod(sizes.values()) != devices or not moving or "device" in found.group(1):
            raise ValueError(f"HLO text: cannot read the groups {found.group(0)!r} of {devices} devices.")
        grid = np.arange(devices).reshape(tuple(sizes.values()))
        names = list(sizes)
        grid = np.moveaxis(grid, [names.index(n) for n in moving], range(-len(moving), 0))
        return grid.reshape(-1, math.prod(sizes[n] for n in moving)).tolist()
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if found:
        shape, source = (tuple(int(n) for n in found.group(k).split(",")) for k in (1, 2))
        grid = np.arange(math.prod(source)).reshape(source)
        if found.group(3):
            grid = grid.transpose([int(n) for n in found.group(3).split(",")])
        return grid.reshape(shape[0], -1).tolist()
    found = re.search(r"replica_groups=\{(\{.*?\})?\}", attributes)
    if found:
        listed = re.findall(r"\{([\d,]+)\}", found.group(1) or "")
        return [[int(n) for n in group.split(",")] for group in listed] or [list(range(devices))]
    raise ValueError(f"HLO text: a collective without groups: {attributes[:120]!r}.")


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of a group differ."""
    shape = tuple(mesh.values())
    moving = np.zeros(len(shape), bool)
    for group in groups:
        at = np.array(np.unravel_index(np.asarray(group), shape))
        moving |= np.any(at != at[:, :1], axis=1)
    return tuple(name for name, moves in zip(mesh, moving, strict=True) if moves)


# ------------------------------------------------------------------------------------------- cost


# The limit of a loop, and which element of what it carries is compared with it.
_Bound = tuple[int, int | None]


def _constant(i: _Instruction | None) -> int | None:
    known = i is not None and i.opcode == "constant" and re.fullmatch(r"-?\d+", i.operands[0])
    return int(i.operands[0]) if i is not None and known else None


def _element(i: _Instruction | None) -> int | None:
    found = re.search(r"\bindex=(\d+)", i.attributes) if i and i.opcode == "get-tuple-element" else None
    return int(found.group(1)) if found else None


class _Counter:
    def __init__(self, text: str, mesh: Mapping[str, int], slice_of: Sequence[int], dynamic_trips: float):
        self.computations, self.entry = _parse(text)
        self.mesh, self.slice_of, self.dynamic_trips = mesh, np.asarray(slice_of), dynamic_trips
        self.flops = self.hbm = 0.0
        self.collectives: dict[tuple[str, tuple[str, ...], str], list[float]] = collections.defaultdict(
            lambda: [0.0, 0.0]
        )
        self.made: dict[tuple[Array, str], None] = {}
        self.dynamic: dict[str, None] = {}
        self.kernels: dict[str, bool] = {}  # whether one says what it costs
        self.in_steps: set[str] = set()  # channels of collectives that are parts of fusions

    def run(self) -> Cost:
        self.walk(self.entry, 1.0, in_memory=True)
        merged = [Collective(*key, *sums) for key, sums in self.collectives.items()]
        largest = sorted(self.made, key=lambda item: -item[0].bytes)
        return Cost(
            self.flops,
            self.hbm,
            tuple(sorted(merged, key=lambda c: -c.bytes)),
            tuple(largest[:8]),
            tuple(self.dynamic),
            tuple(self.kernels),
            tuple(name for name, told in self.kernels.items() if not told),
        )

    def walk(self, name: str, times: float, in_memory: bool, scatter: bool = False) -> None:
        """Adds `times` runs of a computation; `in_memory`: its values are arrays in memory, not parts of a fusion."""
        computation = self.computations[name]
        for key, i in computation.items():
            if key == "ROOT" or i.opcode in _FREE or (i.opcode.endswith("-done")):
                continue
            if i.opcode == "while":
                body, condition = i.called("body"), i.called("condition")
                trips = self.trips(i, str(condition), str(body))
                self.walk(str(body), times * trips, in_memory)
                continue
            if i.opcode == "conditional":
                self.branches(i, times, in_memory)
                continue
            if i.opcode == "call":
                self.walk(str(i.called("to_apply")), times, in_memory)
                continue
            if i.opcode in ("async-start", "fusion"):
                inner = str(i.called("calls") or i.called("to_apply"))
                self.walk(inner, times, in_memory and i.opcode != "fusion", "scatter" in inner)
                if i.opcode == "async-start":
                    continue
            elif i.opcode == "dot":
                self.flops += times * _dot_flops(i, computation)
            elif i.opcode == "convolution":
                self.flops += times * _convolution_flops(i, computation)
            elif i.opcode.removesuffix("-start") in _COLLECTIVES:
                if in_memory or self.is_first_step(i):
                    self.collective(i, computation, times, scatter)
            elif i.opcode == "custom-call":
                found = re.search(r'custom_call_target="([^"]*)"', i.attributes)
                if found and found.group(1) == "tpu_custom_call":
                    self.kernel(i, times)
                    continue
            if in_memory:
                self.hbm += times * self.traffic(i, computation)
                for array in i.arrays[: 1 if i.opcode.endswith("-start") else None]:
                    if not array.fast and array.bytes >= 2**20:
                        self.made[array, i.where] = None

    def kernel(self, i: _Instruction, times: float) -> None:
        estimate = re.search(r'"cost_estimate":\{([^}]*)\}', i.attributes)
        said = {} if estimate is None else dict(re.findall(r'"(\w+)":"?(\d+)', estimate.group(1)))
        told = {"flops", "bytes_accessed"} <= said.keys()
        self.kernels[i.where] = told and self.kernels.get(i.where, True)
        if told:
            self.flops += times * float(said["flops"])
            self.hbm += times * float(said["bytes_accessed"])

    def is_first_step(self, i: _Instruction) -> bool:
        """False where a collective that goes on beside several fusions, in each of which it stands, has been counted."""
        found = re.search(r"\bchannel_id=(\d+)", i.attributes)
        if found is None:
            return True
        seen = found.group(1) in self.in_steps
        self.in_steps.add(found.group(1))
        return not seen

    def branches(self, i: _Instruction, times: float, in_memory: bool) -> None:
        """Of the branches of a conditional the one with the most products counts, then the one with the most traffic."""
        found = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
        names = (
            _NAMES.findall(found.group(1))
            if found
            else [str(i.called("true_computation")), str(i.called("false_computation"))]
        )
        kept = (self.flops, self.hbm, self.collectives)
        results = []
        for name in names:
            self.flops, self.hbm, self.collectives = 0.0, 0.0, collections.defaultdict(lambda: [0.0, 0.0])
            self.walk(name, times, in_memory)
            results.append((self.flops, self.hbm, self.collectives))
        self.flops, self.hbm, self.collectives = kept
        flops, hbm, collectives = max(results, key=lambda r: (r[0], r[1] + sum(b for _, b in r[2].values())))
        self.flops, self.hbm = self.flops + flops, self.hbm + hbm
        for key, (count, size) in collectives.items():
            self.collectives[key][0] += count
            self.collectives[key][1] += size

    def trips(self, loop: _Instruction, condition: str, body: str) -> float:
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if found:
            return float(found.group(1))
        bounds = self.bounds(condition)
        if bounds:
            return float(min(-(-limit // self.step(body, counter)) for limit, counter in bounds))
        self.dynamic[loop.where] = None
        return self.dynamic_trips

    def bounds(self, condition: str) -> list[_Bound]:
        """What is compared with a constant: counters start at 0 and go up."""
        out = []
        computation = self.computations[condition]
        for key, i in computation.items():
            if key != "ROOT" and i.opcode == "fusion":
                out += self.bounds_of_fusion(i, computation)
            elif key != "ROOT" and i.opcode == "compare":
                out += self.compared(i, computation)
        return out

    def bounds_of_fusion(self, fusion: _Instruction, outer: Mapping[str, _Instruction]) -> list[_Bound]:
        inner = self.within(fusion, outer)
        return [
            bound
            for key, i in inner.items()
            if i.opcode == "compare" and key != "ROOT"
            for bound in self.compared(i, inner)
        ]

    def within(self, fusion: _Instruction, outer: Mapping[str, _Instruction]) -> dict[str, _Instruction]:
        """The instructions of a fusion by name, in place of its parameters what they are outside."""
        inner = self.computations[str(fusion.called("calls"))]
        given = {
            i.name: outer.get(fusion.operands[int(i.operands[0])])
            for key, i in inner.items()
            if i.opcode == "parameter" and key != "ROOT"
        }
        return {name: given.get(i.name) or i for name, i in inner.items()}

    def compared(self, i: _Instruction, around: Mapping[str, _Instruction]) -> list[_Bound]:
        direction = re.search(r"direction=(\w+)", i.attributes)
        sides = [around.get(name) for name in i.operands]
        if direction is None or len(sides) != 2:
            return []
        left, right = (_constant(side) for side in sides)
        if right is not None and direction.group(1) in ("LT", "LE", "NE"):
            return [(right + (direction.group(1) == "LE"), _element(sides[0]))]
        if left is not None and direction.group(1) in ("GT", "GE"):
            return [(left + (direction.group(1) == "GE"), _element(sides[1]))]
        return []

    def step(self, body: str, counter: int | None) -> int:
        """By how much a counter, an element of what the loop carries, goes up in a turn; 1 where the body does not tell."""
        around: Mapping[str, _Instruction] = self.computations[body]
        root = around.get("ROOT")
        if counter is None or root is None or root.opcode != "tuple":
            return 1
        new = around.get(root.operands[counter])
        while new is not None and new.opcode in ("copy", "bitcast", "fusion"):
            if new.opcode == "fusion":
                around = self.within(new, around)
                new = around.get("ROOT")
            else:
                new = around.get(new.operands[0])
        if new is None or new.opcode != "add":
            return 1
        sides = [around.get(name) for name in new.operands]
        added = [_constant(side) for side in sides if _element(side) != counter]
        return added[0] if len(added) == 1 and added[0] else 1

    def collective(
        self, i: _Instruction, around: Mapping[str, _Instruction], times: float, scatter: bool
    ) -> None:
        kind = i.opcode.removesuffix("-start")
        operands = [array for name in i.operands if name in around for array in around[name].arrays]
        given = sum(array.bytes for array in operands)
        groups = replica_groups(i.attributes, math.prod(self.mesh.values()))
        if kind == "collective-permute":
            groups = [pair for pair in groups if pair[0] != pair[1]]
            if not groups:
                return
        n = max(len(group) for group in groups)
        if n == 1:
            return
        if kind == "all-reduce" and scatter:  # fused with the slice that a chip keeps
            kind = "reduce-scatter"
        sent = {
            "all-gather": given * (n - 1),
            "all-reduce": 2 * given * (n - 1) / n,
            "reduce-scatter": given * (n - 1) / n,
            "all-to-all": given * (n - 1) / n,
            "collective-permute": given,
        }[kind]
        slices = [set(self.slice_of[np.asarray(group)].tolist()) for group in groups]
        network = "DCN" if any(len(s) > 1 for s in slices) else "ICI"
        sums = self.collectives[kind, _axes(groups, self.mesh), network]
        sums[0] += times
        sums[1] += times * sent

    # ------------------------------------------------------------------------------ memory traffic

    def traffic(self, i: _Instruction, around: Mapping[str, _Instruction]) -> float:
        """Bytes of HBM that an operation reads and writes; of an array that it takes a slice of, the slice."""
        outputs = i.arrays[:1] if i.opcode.endswith("-start") else i.arrays
        written: float = sum(array.bytes for array in outputs if not array.fast)
        if i.opcode in _SLICING:
            return 2 * written
        if i.opcode in ("dynamic-update-slice", "scatter"):
            update = around.get(i.operands[1 if i.opcode == "dynamic-update-slice" else -1])
            return 2 * sum(a.bytes for a in update.arrays if not a.fast) if update else written
        read = 0.0
        for position, name in enumerate(i.operands):
            source = around.get(name)
            if source is None or len(source.arrays) != 1 or source.arrays[0].fast:
                continue
            whole: float = source.arrays[0].bytes
            if i.opcode == "fusion":
                whole = min(whole, self.read_by(str(i.called("calls")), position, whole))
            read += whole
        if i.opcode == "fusion":
            written = self.written_by(str(i.called("calls")), written)
        return read + written

    def read_by(self, name: str, position: int, whole: float) -> float:
        """Bytes that a fused computation reads of its argument at `position`."""
        inner = self.computations[name]
        argument = next(
            (i for i in inner.values() if i.opcode == "parameter" and i.operands[0] == str(position)), None
        )
        return whole if argument is None else self._read(inner, argument.name, whole)

    def _read(self, inner: Mapping[str, _Instruction], name: str, whole: float) -> float:
        read = 0.0
        for key, user in inner.items():
            if key == "ROOT" or name not in user.operands:
                continue
            at = user.operands.index(name)
            if user.opcode in _SLICING and at == 0:
                read += sum(array.bytes for array in user.arrays)
            elif user.opcode in ("dynamic-update-slice", "scatter") and at == 0:
                continue  # in place
            elif user.opcode == "bitcast":
                read += self._read(inner, user.name, whole)
            elif user.opcode == "fusion":
                read += self.read_by(str(user.called("calls")), at, whole)
            else:
                return whole
        return read

    def written_by(self, name: str, whole: float) -> float:
        """Bytes that a fused computation writes: of an update in place, the update."""
        inner = self.computations[name]
        root = inner.get("ROOT")
        while root is not None and root.opcode == "bitcast":
            root = inner.get(root.operands[0])
        if root is not None and root.opcode == "dynamic-update-slice":
            update = inner.get(root.operands[1])
            return sum(array.bytes for array in update.arrays) if update else whole
        if root is not None and root.opcode == "fusion":
            return self.written_by(str(root.called("calls")), whole)
        return whole


def cost(
    text: str, mesh: Mapping[str, int], slice_of: Sequence[int] | None = None, dynamic_trips: float = 1.0
) -> Cost:
    """The cost of a compiled program.

    Args:
      text: `compiled.as_text()`.
      mesh: sizes of the axes, in their order; partition p lies at np.unravel_index(p, sizes).
      slice_of: slice of each partition; None: one slice.
      dynamic_trips: turns of loops that the data end.

    Raises:
      ValueError: the text is not HLO as this version of JAX prints it.
    """
    slices = [0] * math.prod(mesh.values()) if slice_of is None else slice_of
    return _Counter(text, mesh, slices, dynamic_trips).run()
