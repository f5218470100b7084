"""Digests: the same on host, device and every mesh; any single change is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.runtime import collectives_need_compiling
from jaxrl_llm.snapshots.digest import fingerprint, leaf_records, named_leaves


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        np.int32,
        np.uint32,
        np.int8,
        np.uint8,
        np.bool_,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
        np.complex64,
    ],
)
def test_host_and_device_agree(dtype):
    host = (np.random.default_rng(0).normal(size=(5, 3, 2)) * 3).astype(dtype)
    device = jnp.asarray(host)
    assert device.dtype == host.dtype
    assert leaf_records({"x": host}) == leaf_records({"x": device})


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (("a", "b"),), (None, "b"), (None, None, "b")])
def test_every_sharding_gives_the_same_fingerprint_without_a_gather(spec):
    collectives_need_compiling(jax.devices())
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    array = jax.random.normal(jax.random.key(0), (16, 8, 6))
    tree = {"w": array, "n": jnp.asarray(3)}
    spread = {**tree, "w": jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))}
    assert fingerprint(spread) == fingerprint(tree) == fingerprint(jax.tree.map(np.asarray, tree))
    from jaxrl_llm.snapshots.digest import _device_lanes

    compiled = _device_lanes.lower(spread["w"], spread=True).compile().as_text()
    assert "all-gather" not in compiled


def test_any_single_bit_changes_the_digest():
    array = np.random.default_rng(1).integers(0, 2**32, 24, dtype=np.uint32)
    original = leaf_records({"x": array})["x"]["digest"]
    seen = {original}
    for word in range(array.size):
        for bit in range(32):
            changed = array.copy()
            changed[word] ^= np.uint32(1 << bit)
            digest = leaf_records({"x": changed})["x"]["digest"]
            assert digest[:8] != original[:8]  # lane one is a bijection of each word
            seen.add(digest)
    assert len(seen) == 1 + 24 * 32


def test_order_shape_dtype_and_names_matter():
    x = np.arange(6, dtype=np.float32)
    prints = [
        fingerprint(tree)
        for tree in (
            {"a": x},
            {"a": x[::-1]},
            {"a": x.reshape(2, 3)},
            {"a": x.view(np.int32)},
            {"b": x},
            {"a": {"a": x}},
            {"a": np.where(x == 0, -0.0, x).astype(np.float32)},
        )
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint({"a": x, "b": x + 1}) == fingerprint({"b": x + 1, "a": x})


def test_typed_keys_and_python_scalars_have_digests():
    one = leaf_records({"k": jax.random.key(0), "n": 3, "f": 0.5})
    two = leaf_records({"k": jax.random.key(1), "n": 4, "f": 0.25})
    assert all(one[name]["digest"] != two[name]["digest"] for name in one)
    assert one["k"]["dtype"] == "key<fry>"


def test_paths_are_escaped_and_ambiguity_is_refused():
    assert list(named_leaves({"a/b": [1, {"c%": 2}]})) == ["a%2Fb/0", "a%2Fb/1/c%25"]

    class Odd:
        def __init__(self, children):
            self.children = children

    jax.tree_util.register_pytree_with_keys(
        Odd,
        lambda odd: ([(jax.tree_util.DictKey("same"), child) for child in odd.children], None),
        lambda _, children: Odd(children),
    )
    with pytest.raises(ValueError, match="'same'"):
        named_leaves(Odd([1, 2]))
