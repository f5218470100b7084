"""Meshes, sharding rules, transfers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.parallel.mesh import batch_shards, learner_and_sampler, make_mesh
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


class Chip:
    """As much of a TPU as a mesh reads."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v5", 0, 0

    def __init__(self, coords, slice_index):
        self.coords, self.slice_index = coords, slice_index

    def __repr__(self):
        return f"{self.slice_index}:{self.coords}"


def chips(shape, slices):
    """As JAX lists them where a process has hosts of all slices: not slice by slice."""
    places = [(x, y, z) for z in range(shape[2]) for y in range(shape[1]) for x in range(shape[0])]
    return [Chip(at, index) for at in places for index in reversed(range(slices))]


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 4, "tensor": 4},
        {"data": 4, "fsdp": 2, "tensor": 4},
        {"data": 8, "expert": 2, "context": 2},
        {"data": 32},
    ],
)
def test_between_slices_only_the_data_axis_crosses(sizes):
    devices = chips((2, 2, 4), 2)
    mesh = make_mesh(**sizes, devices=devices)
    assert set(mesh.devices.flat) == set(devices)
    of = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    half = mesh.shape["data"] // 2
    assert (of[:half] == 0).all() and (of[half:] == 1).all()
    # Each half has the layout that the slice alone has.
    alone = make_mesh(**sizes | {"data": half}, devices=[chip for chip in devices if chip.slice_index == 1])
    assert (alone.devices == mesh.devices[half:]).all()


def test_neighbours_in_the_mesh_are_neighbours_in_the_network():
    mesh = make_mesh(fsdp=4, tensor=4, devices=chips((2, 2, 4), 1))
    lines = [[chip.coords for chip in line] for line in mesh.devices.reshape(4, 4)]
    # tensor runs along the longest side, or within one plane: in every group two coordinates stay or one does
    assert all(len({at[2] for at in line}) in (1, 4) for line in lines)
    # 5 of 16 chips are no torus of their own
    some = chips((2, 2, 4), 1)[:5]
    assert list(make_mesh(fsdp=5, devices=some).devices.flat) == some


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 8, "tensor": 4}, "2 slices must divide mesh.data.*mesh.data=2.*product is 16"),
        ({"data": 1, "fsdp": 24}, "takes 16 and 8 devices of 2 slices.*16 devices of one"),
    ],
)
def test_no_other_axis_may_cross_slices(sizes, message):
    devices = chips((2, 2, 4), 2)
    of_both = sorted(devices, key=lambda chip: chip.slice_index)[: math.prod(sizes.values())]
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=of_both)


@pytest.mark.parametrize(
    ("learner", "sampler", "begins"),
    [
        (16, 16, 16),  # a slice each
        (8, 16, 16),  # the sampler's own slice, though there is room beside the learner
        (8, 4, 16),
        (8, 20, 8),  # more than a slice: beside the learner
        (16, 4, 16),
    ],
)
def test_a_sampler_has_slices_of_its_own_where_they_suffice(learner, sampler, begins):
    devices = chips((2, 2, 4), 2)
    ordered = sorted(devices, key=lambda chip: chip.slice_index)
    learns, samples = learner_and_sampler(devices, learner, sampler)
    assert learns == ordered[:learner]
    assert samples == ordered[begins : begins + sampler]
    assert {chip.slice_index for chip in make_mesh(fsdp=learner, devices=learns).devices.flat} == {0}


def test_on_one_slice_a_sampler_is_beside_the_learner():
    assert learner_and_sampler(jax.devices(), 2, 3)[1] == jax.devices()[2:5]


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
    assert PartitionSpec(None, "fsdp", "tensor") in split
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
