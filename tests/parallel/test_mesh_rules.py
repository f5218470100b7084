"""Meshes, sharding rules, transfers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.parallel.mesh import batch_shards, make_mesh
from jaxrl_llm.parallel.rules import DEFAULT_RULES, param_shardings, partition_spec, state_shardings
from jaxrl_llm.parallel.transfer import transfer
from jaxrl_llm.recipes import grpo


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1, 1, 1), (2, 2, 1, 1, 2), (1, 4, 1, 1, 1), (2, 1, 2, 1, 2), (1, 2, 1, 2, 2)]
)
def test_mesh_has_the_five_axes_under_automatic_placement(sizes):
    data, fsdp, expert, context, tensor = sizes
    mesh = make_mesh(data, fsdp, tensor, expert=expert, context=context)
    assert tuple(mesh.shape.values()) == sizes and mesh.axis_names == (
        "data",
        "fsdp",
        "expert",
        "context",
        "tensor",
    )
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert batch_shards(mesh) == data * fsdp * expert


def test_mesh_of_given_devices():
    devices = jax.devices()[4:6]
    assert set(make_mesh(2, devices=devices).devices.flat) == set(devices)
    assert batch_shards(None) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 3, "fsdp": 3}, "takes 9 devices, 8 are given"),
        ({"data": 0}, "at least 1"),
        ({"data": 2, "devices": []}, "2 devices, 0 are given"),
    ],
)
def test_impossible_meshes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**arguments)


def test_rules_are_strict():
    assert partition_spec(("layers", "embed", "mlp")) == PartitionSpec(None, ("fsdp", "context"), "tensor")
    assert partition_spec((None,)) == PartitionSpec(None)
    with pytest.raises(
        ValueError, match="no rule for the logical axis 'expert'.*Known: embed, experts, heads"
    ):
        partition_spec(("expert", "embed"))
    with pytest.raises(
        ValueError, match=r"'tensor' would split two.*\('heads', 'mlp'\).*P.*\('tensor', 'tensor'"
    ):
        partition_spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="'fsdp' would split two"):
        partition_spec(("embed", "mlp"), {**DEFAULT_RULES, "mlp": ("fsdp", "tensor")})


def test_a_dimension_that_does_not_divide_is_named():
    with pytest.raises(
        ValueError, match=r"\['embed'\] has 64 entries along 'embed'.*3 shards of mesh axis 'fsdp'"
    ):
        param_shardings(TINY, make_mesh(fsdp=3, devices=jax.devices()[:3]))


def test_a_rule_for_an_axis_that_the_mesh_lacks_is_named():
    with pytest.raises(ValueError, match="'model', which is not an axis of the mesh"):
        param_shardings(TINY, make_mesh(), {**DEFAULT_RULES, "mlp": "model"})


def test_places_are_written_as_programs_write_them():
    """Else the second call of a step, with what the first returned, would compile it once more."""
    specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings(TINY, make_mesh(1, 4, 1)))
    assert specs["final_norm"] == specs["layers"]["attn_norm"] == PartitionSpec()
    assert specs["layers"]["gate"] == PartitionSpec(None, "fsdp")  # and not (None, "fsdp", "tensor")
    assert specs["layers"]["down"] == PartitionSpec(None, None, "fsdp")


def test_moments_lie_where_their_parameters_lie():
    mesh = make_mesh(2, 2, 2)
    objective, optimizer = grpo(), make_optimizer(1e-3, weight_decay=0.1)
    state = jax.eval_shape(
        lambda params, key: init_state(params, optimizer, objective, key=key, reference=True),
        abstract_params(TINY),
        jax.random.key(0),
    )
    shardings = state_shardings(state, optimizer, TINY, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    split = [s.spec for s in jax.tree.leaves(shardings.params)]
    assert PartitionSpec(None, ("fsdp", "context"), "tensor") in split
    assert [s.spec for s in jax.tree.leaves(shardings.reference)] == split
    moments = [s.spec for s in jax.tree.leaves(shardings.opt_state) if s.spec != PartitionSpec()]
    assert moments == [spec for spec in split if spec != PartitionSpec()] * 2
    assert shardings.version.spec == PartitionSpec()


def test_state_on_a_mesh_needs_a_config():
    with pytest.raises(ValueError, match="config="):
        init_state({}, make_optimizer(1e-3), grpo(), key=jax.random.key(0), mesh=make_mesh())


# ------------------------------------------------------------------------------------- transfer


def _tree():
    return {"a": jnp.arange(32, dtype=jnp.float32).reshape(8, 4) / 7, "b": jnp.arange(3)}


def test_transfer_reshards_casts_and_never_aliases():
    mesh = make_mesh(1, 2, 2)
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), (None, "tensor")))
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(_tree(), {"a": rows, "b": everywhere})
    moved = transfer(params, {"a": columns, "b": everywhere}, "bfloat16")
    assert moved["a"].sharding == columns and moved["a"].dtype == jnp.bfloat16
    assert moved["b"].dtype == jnp.int32  # only floating-point leaves are cast
    assert np.array_equal(moved["a"], np.asarray(params["a"].astype(jnp.bfloat16)))

    same = transfer(params, {"a": rows, "b": everywhere})
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # what a donating learner does
    assert np.array_equal(same["a"], _tree()["a"]) and np.array_equal(same["b"], [0, 1, 2])


def test_transfer_to_other_devices():
    here = NamedSharding(make_mesh(2, devices=jax.devices()[:2]), PartitionSpec("data"))
    there = NamedSharding(make_mesh(4, devices=jax.devices()[4:]), PartitionSpec("data"))
    moved = transfer(jax.device_put({"a": _tree()["a"]}, here), {"a": there}, "bfloat16")
    assert moved["a"].sharding == there and moved["a"].dtype == jnp.bfloat16


def test_transfer_between_different_trees_is_refused():
    everywhere = NamedSharding(make_mesh(), PartitionSpec())
    with pytest.raises(ValueError, match="differ in structure"):
        transfer(_tree(), {"a": everywhere})
