"""Safetensors files: a checked, memory-mapped reader and a streaming writer.

The layout is 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
and the data. Read by hand, so that bfloat16 works on every version of the library, so that one tensor
is read at a time, and so that a damaged file is refused with its name. Nothing here can run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl_llm.errors import InputError

__all__ = ["StoredTensor", "TensorLayout", "read_tensors", "write_tensors"]

_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_FLOATS = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_CODES = {dtype: code for code, dtype in _FLOATS.items()}
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the reference implementation


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. Nothing is read before `read`."""

    name: str
    path: Path
    code: str  # dtype as the file spells it
    shape: tuple[int, ...]
    memory: np.ndarray  # u8[bytes of the tensor], a view of the mapped file

    def read(self) -> np.ndarray:
        """The values in their stored dtype: a read-only view of the mapped file.

        Raises:
          InputError: the dtype is not a plain floating one (a quantised checkpoint).
        """
        if self.code not in _FLOATS:
            raise InputError(
                f"{self.path}: tensor {self.name} has dtype {self.code}; readable: {', '.join(_FLOATS)}. "
                "Quantised safetensors are not supported: use the unquantised model or a GGUF file."
            )
        return self.memory.view(_FLOATS[self.code]).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """What a file will hold under one name."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _damaged(path: Path, why: str) -> InputError:
    return InputError(
        f"{path}: not a valid safetensors file ({why}). It is truncated or damaged: fetch or export it again."
    )


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Maps a safetensors file and checks its header against its size.

    Raises:
      InputError: the file is truncated, has bytes that no tensor owns, or its header is not valid.
    """
    size = path.stat().st_size
    if size < 8:
        raise _damaged(path, f"{size} bytes long")
    memory = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(memory[:8].tobytes(), "little")
    if length > min(size - 8, _LARGEST_HEADER):
        raise _damaged(path, f"its header claims {length} bytes and the file has {size}")
    try:
        header = json.loads(memory[8 : 8 + length].tobytes().decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also JSONDecodeError and UnicodeDecodeError
        raise _damaged(path, f"header: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    header.pop("__metadata__", None)

    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            valid = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) and code in _SIZES
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise _damaged(path, f"the entry of {name} is {entry!r}")
        if end - start != math.prod(shape) * _SIZES[code]:
            raise _damaged(path, f"{name} is {code}{list(shape)} but has {end - start} bytes")
        spans.append((start, end))
        data = memory[8 + length + start : 8 + length + end]
        if data.size != end - start:
            raise _damaged(path, f"{name} ends at byte {8 + length + end} and the file has {size}")
        tensors[name] = StoredTensor(name, path, code, shape, data)
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise _damaged(path, f"byte {position} of its data: tensors overlap or leave a hole")
        position = end
    if 8 + length + position != size:
        raise _damaged(path, f"its tensors end at byte {8 + length + position} and the file has {size}")
    return tensors


def write_tensors(
    path: Path,
    layouts: Sequence[TensorLayout],
    produce: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Writes a safetensors file, one tensor in memory at a time; returns the SHA-256 of the file in hex.

    Args:
      layouts: what to write, in file order; dtypes float16, bfloat16, float32 or float64.
      produce: called once per name, gives the values; dtype and shape must be those of the layout.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    position = 0
    for layout in layouts:
        header[layout.name] = {
            "dtype": _CODES[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [position, position + layout.size],
        }
        position += layout.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts on a multiple of 8
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(data) -> None:
            file.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for layout in layouts:
            values = np.ascontiguousarray(produce(layout.name)).reshape(layout.shape)
            if values.dtype != layout.dtype:
                raise ValueError(f"write_tensors: {layout.name} is {values.dtype}, announced {layout.dtype}.")
            put(values.reshape(-1).view(np.uint8).data if values.size else b"")
    return digest.hexdigest()
