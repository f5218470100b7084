"""What the host gives to devices and reads from them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl_llm.parallel import host
from jaxrl_llm.parallel.mesh import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, tensor=2, devices=jax.devices()[:4])


@pytest.mark.parametrize("put", [host.place, lambda tree, where: jax.tree.map(host._spread, tree, where)])
def test_arrays_lie_where_they_are_put(mesh, put):
    tree = {
        "a": np.arange(8.0).reshape(4, 2),
        "b": jax.numpy.arange(3),
        "key": jax.random.key(5),
        "none": None,
    }
    where = {
        "a": NamedSharding(mesh, PartitionSpec("data", "tensor")),
        "b": NamedSharding(mesh, PartitionSpec()),
        "key": NamedSharding(mesh, PartitionSpec()),
        "none": None,
    }
    placed = put(tree, where)
    for name in ("a", "b", "key"):
        assert placed[name].sharding.is_equivalent_to(where[name], placed[name].ndim)
    back = host.read({"a": placed["a"], "b": placed["b"], "none": None})
    np.testing.assert_array_equal(back["a"], tree["a"])
    np.testing.assert_array_equal(back["b"], np.arange(3))
    assert back["none"] is None
    assert jax.random.key_impl(placed["key"]) == jax.random.key_impl(tree["key"])
    np.testing.assert_array_equal(jax.random.key_data(placed["key"]), jax.random.key_data(tree["key"]))


def test_one_place_for_a_whole_tree(mesh):
    everywhere = NamedSharding(mesh, PartitionSpec())
    for where in (everywhere, jax.devices()[3], None):
        placed = host.place({"a": np.ones(3), "b": [np.zeros(2)]}, where)
        devices = {everywhere: 4}.get(where, 1)
        assert {len(x.devices()) for x in jax.tree.leaves(placed)} == {devices}


def test_where_a_tree_is_spread(mesh):
    split = NamedSharding(mesh, PartitionSpec("data"))
    tree = {"host": np.ones(4), "one": jax.device_put(np.ones(4), SingleDeviceSharding(jax.devices()[1]))}
    assert host.everywhere(tree) is None
    spread = host.everywhere({**tree, "x": jax.device_put(np.ones(4), split)})
    assert spread is not None and spread.mesh == mesh and spread.is_fully_replicated
