"""The safetensors reader and writer, against the reference library and against damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.formats.cache import file_digest
from jaxrl_llm.models.formats.tensors import TensorLayout, read_tensors, write_tensors

VALUES = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.asarray([1.5, -2.0], np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.asarray(3.0, np.float64),
}


def _write(path, values):
    layouts = [TensorLayout(n, v.dtype, v.shape) for n, v in values.items()]
    return write_tensors(path, layouts, values.__getitem__)


def _raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_the_library_writes(tmp_path):
    save_file(VALUES, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = read_tensors(tmp_path / "x.safetensors")
    assert sorted(read) == sorted(VALUES)
    for name, value in VALUES.items():
        assert read[name].read().dtype == value.dtype
        np.testing.assert_array_equal(read[name].read(), value)


def test_the_library_reads_what_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    assert _write(path, VALUES) == file_digest(path)
    with safe_open(path, "numpy") as file:
        for name, value in VALUES.items():
            np.testing.assert_array_equal(file.get_tensor(name), value)


def test_bfloat16_round_trip(tmp_path):
    values = {"x": np.asarray([[1.0, 3.140625], [-0.5, 2.0**100]], ml_dtypes.bfloat16)}
    _write(tmp_path / "x.safetensors", values)
    read = read_tensors(tmp_path / "x.safetensors")["x"].read()
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read.view(np.uint16), values["x"].view(np.uint16))


def test_writer_refuses_another_dtype_than_announced(tmp_path):
    with pytest.raises(ValueError, match="x is float64, announced float32"):
        write_tensors(
            tmp_path / "x", [TensorLayout("x", np.dtype(np.float32), (2,))], lambda n: np.zeros(2, np.float64)
        )


def test_every_truncation_is_refused(tmp_path):
    whole, cut = tmp_path / "x.safetensors", tmp_path / "cut.safetensors"
    _write(whole, VALUES)
    data = whole.read_bytes()
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"cut\.safetensors: not a valid safetensors file"):
            read_tensors(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(InputError, match="tensors end at byte"):
        read_tensors(cut)


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"not json", b"", "header:"),
        (b"\xff\xfe", b"", "header:"),
        ([1], b"", "not an object"),
        (
            {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"\0" * 4,
            r"x is F32\[2\] but has 4 bytes",
        ),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4, "entry of x"),
        ({"x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, "entry of x"),
        ({"x": {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, "entry of x"),
        ({"x": 3}, b"", "entry of x"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8, "leave a hole"),
        (
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "xy"},
            b"\0" * 4,
            "overlap",
        ),
        (
            b'{"x": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"\0" * 4,
            "occurs twice",
        ),
    ],
)
def test_bad_headers_are_refused(tmp_path, header, data, reason):
    with pytest.raises(InputError, match=reason):
        read_tensors(_raw(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_the_file_is_refused_at_once(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match="its header claims"):
        read_tensors(path)


def test_integer_weights_are_refused_by_dtype(tmp_path):
    save_file({"w": np.zeros(4, np.int8)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="tensor w has dtype I8"):
        read_tensors(tmp_path / "x.safetensors")["w"].read()
