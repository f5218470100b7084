"""Costs counted from compiled text: loops as often as they run, collectives by axis, slices and not whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.planning.hlo import cost, replica_groups

ONE = {"data": 1}


def text_of(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().as_text()


def matrix(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_products_of_a_program_without_loops_are_those_of_xla():
    def f(a, b):
        return jnp.tanh(a @ b) @ b.T

    given = matrix(32, 48), matrix(48, 64)
    compiled = jax.jit(f).lower(*given).compile()
    assert cost(compiled.as_text(), ONE).flops == 2 * 32 * 48 * 64 * 2
    assert compiled.cost_analysis()["flops"] == pytest.approx(2 * 32 * 48 * 64 * 2, rel=0.05)


def test_a_scanned_body_counts_as_often_as_it_runs_and_a_nested_one_multiplies():
    def f(x, w):
        def outer(x, w):
            x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)
            return x, None

        return jax.lax.scan(outer, x, w)[0]

    assert cost(text_of(f, matrix(32, 64), matrix(7, 64, 64)), ONE).flops == 7 * 3 * 2 * 32 * 64 * 64


def test_a_loop_that_the_data_end_takes_its_bound_or_the_given_number_of_turns():
    def f(x, w, n, *, most):
        def going(carry):
            return (carry[0] < n) & (carry[0] < most) if most else carry[0] < n

        return jax.lax.while_loop(going, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (jnp.int32(0), x))[1]

    once = 2 * 32 * 64 * 64
    n = jax.ShapeDtypeStruct((), jnp.int32)
    given = matrix(32, 64), matrix(64, 64), n
    bounded = cost(text_of(lambda x, w, n: f(x, w, n, most=11), *given), ONE)
    assert bounded.flops == 11 * once and not bounded.dynamic_loops
    text = text_of(lambda x, w, n: f(x, w, n, most=0), *given)
    assert cost(text, ONE).flops == once
    assert cost(text, ONE, dynamic_trips=5).flops == 5 * once
    assert len(cost(text, ONE).dynamic_loops) == 1


# A product with weights that are gathered meanwhile, as XLA writes it for TPUs: a turn takes the shards of two neighbours, so
# the counter goes up by 2. In the second form the addition is part of a fusion.
WINDOWED = """HloModule windowed

%add (p.0: u32[], p.1: u32[]) -> u32[] {
  %p.0 = u32[] parameter(0)
  %p.1 = u32[] parameter(1)
  ROOT %sum = u32[] add(%p.0, %p.1)
}

%body (carry: (f32[8,16], u32[])) -> (f32[8,16], u32[]) {
  %carry = (f32[8,16]{1,0}, u32[]) parameter(0)
  %shard = f32[8,16]{1,0} get-tuple-element(%carry), index=0
  %turn = u32[] get-tuple-element(%carry), index=1
  %two = u32[] constant(2)
  %next = f32[8,16]{1,0} collective-permute(%shard), source_target_pairs={{0,1},{1,0}}
  %after = u32[] add(%two, %turn)
  ROOT %carried = (f32[8,16]{1,0}, u32[]) tuple(%next, %after)
}

%condition (carried.1: (f32[8,16], u32[])) -> pred[] {
  %carried.1 = (f32[8,16]{1,0}, u32[]) parameter(0)
  %at = u32[] get-tuple-element(%carried.1), index=1
  %limit = u32[] constant(7)
  ROOT %going = pred[] compare(%at, %limit), direction=LT
}

ENTRY %main (given: f32[8,16]) -> f32[8,16] {
  %given = f32[8,16]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %first = (f32[8,16]{1,0}, u32[]) tuple(%given, %zero)
  %loop = (f32[8,16]{1,0}, u32[]) while(%first), condition=%condition, body=%body
  ROOT %result = f32[8,16]{1,0} get-tuple-element(%loop), index=0
}
"""


@pytest.mark.parametrize("addition", ["add(%two, %turn)", "fusion(%turn, %two), kind=kLoop, calls=%add"])
def test_a_counter_that_goes_up_by_two_reaches_its_bound_in_half_the_turns(addition):
    text = WINDOWED.replace("add(%two, %turn)", addition)
    (moved,) = cost(text, {"fsdp": 2}).collectives
    assert (moved.kind, moved.axes, moved.count) == ("collective-permute", ("fsdp",), 4)  # at 0, 2, 4 and 6
    assert moved.bytes == 4 * 8 * 16 * 4


# A gather that goes on beside two fusions: each of them has it, under one channel.
STEPS = """HloModule steps

%first (p.0: f32[8,16]) -> f32[16,16] {
  %p.0 = f32[8,16]{1,0} parameter(0)
  ROOT %all-gather.0 = f32[16,16]{1,0} all-gather(%p.0), channel_id=5, replica_groups={{0,1}}, dimensions={0}
}

%second (p.1: f32[8,16]) -> f32[16,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[16,16]{1,0} all-gather(%p.1), channel_id=5, replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (given: f32[8,16]) -> (f32[16,16], f32[16,16], f32[16,16]) {
  %given = f32[8,16]{1,0} parameter(0)
  %one = f32[16,16]{1,0} fusion(%given), kind=kCustom, calls=%first
  %two = f32[16,16]{1,0} fusion(%given), kind=kCustom, calls=%second
  %other = f32[16,16]{1,0} all-gather(%given), channel_id=6, replica_groups={{0,1}}, dimensions={0}
  ROOT %all = (f32[16,16]{1,0}, f32[16,16]{1,0}, f32[16,16]{1,0}) tuple(%one, %two, %other)
}
"""


def test_a_collective_beside_several_fusions_is_sent_once():
    (gathered,) = cost(STEPS, {"fsdp": 2}).collectives
    assert (gathered.count, gathered.bytes) == (2, 2 * 8 * 16 * 4)  # that of channel 5 and that of channel 6


def test_memory_of_a_scan_over_stacked_weights_is_that_of_the_slices():
    layers, size = 16, 256
    text = text_of(
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        matrix(8, size),
        matrix(layers, size, size),
    )
    weights = 4 * layers * size * size
    # Each layer is read once or twice (sliced out, then multiplied with), and not all of them in every turn.
    assert weights <= cost(text, ONE).hbm_bytes <= 4 * weights


@pytest.fixture(scope="module")
def sharded():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    def f(x, w):
        def body(x, w):
            y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows)
            return y, None

        y, _ = jax.lax.scan(body, x, w)
        return jnp.sum(y)

    rows = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct(
        (5, 32, 32), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp", "tensor"))
    )
    return dict(mesh.shape), text_of(f, x, w)


def test_collectives_are_summed_by_axis_and_by_turns(sharded):
    mesh, text = sharded
    found = cost(text, mesh)
    assert {c.network for c in found.collectives} == {"ICI"}
    gathered = {c.axes: c for c in found.collectives if c.kind == "all-gather" and c.bytes > 1000}
    # The weights of a layer are gathered over fsdp: half of [32, 16] arrives from the other device, 5 times.
    assert gathered[("fsdp",)].bytes == 5 * 16 * 16 * 4
    assert gathered[("fsdp",)].count == 5


def test_what_crosses_slices_is_counted_apart(sharded):
    mesh, text = sharded
    slices = [device // 4 for device in range(8)]  # data lies across two slices
    found = cost(text, mesh, slices)
    across = [c for c in found.collectives if c.network == "DCN"]
    assert across and all("data" in c.axes for c in across)
    assert found.network_bytes("DCN") < found.network_bytes("ICI")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
    ],
)
def test_groups_in_every_notation(text, groups):
    assert replica_groups(text, 4) == groups


# What TPUs write: products as convolutions of many forms, S(1) = not in HBM, a reduce-scatter as a fusion.
TPU = """HloModule jit_f, is_scheduled=true, num_partitions=4

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[]{:T(256)} add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,32]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add.1
  %zero = s32[]{:T(128)} constant(0)
  ROOT %kept = f32[16,32]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={16,32}
}

%fused_computation.1 (p0: bf16[8,48], p1: bf16[48,8,4]) -> bf16[8,8,4] {
  %p0 = bf16[8,48]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[48,8,4]{2,1,0:T(8,128)(2,1)} parameter(1)
  %wide = bf16[8,1,48]{2,1,0:T(8,128)(2,1)} bitcast(%p0)
  ROOT %convolution.1 = bf16[8,8,4]{2,1,0:T(8,128)(2,1)} convolution(%wide, %p1), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_i0o->b0f
}

ENTRY %main (a: bf16[8,48], b: bf16[48,8,4], c: f32[64,32]) -> f32[16,32] {
  %a = bf16[8,48]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[48,8,4]{2,1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[64,32]{1,0:T(8,128)} parameter(2)
  %copy-start.1 = (bf16[8,48]{1,0:T(8,128)(2,1)S(1)}, bf16[8,48]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done.1 = bf16[8,48]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %product = bf16[8,8,4]{2,1,0:T(8,128)(2,1)S(1)} fusion(%copy-done.1, %b), kind=kOutput, calls=%fused_computation.1
  ROOT %scattered = f32[16,32]{1,0:T(8,128)} fusion(%c), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_the_forms_that_tpus_write():
    found = cost(TPU, {"fsdp": 4})
    # A window over an axis of length 1, padded by 7: only one of its 8 entries meets data at each place.
    assert found.flops == 2 * 8 * 48 * 32
    (scatter,) = found.collectives
    assert (scatter.kind, scatter.axes, scatter.count) == ("reduce-scatter", ("fsdp",), 1)
    assert scatter.bytes == 64 * 32 * 4 * 3 / 4
    moved_once, weights, scattered = 8 * 48 * 2, 48 * 32 * 2, (64 + 16) * 32 * 4
    assert found.hbm_bytes == moved_once + weights + scattered


KERNELS = """HloModule jit_f

%body (given: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %given = (s32[], f32[8,128]) parameter(0)
  %turn = s32[] get-tuple-element(%given), index=0
  %x = f32[8,128] get-tuple-element(%given), index=1
  %told = f32[8,128] custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/told"}, backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":{"flops":"1000","transcendentals":"7","bytes_accessed":"500"}}}
  %quiet = f32[8,128] custom-call(%told), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/quiet"}, backend_config={"custom_call_config":{"body":"TUzvUg=="}}
  ROOT %next = (s32[], f32[8,128]) tuple(%turn, %quiet)
}

%condition (given: (s32[], f32[8,128])) -> pred[] {
  %given = (s32[], f32[8,128]) parameter(0)
  ROOT %going = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %a = (s32[], f32[8,128]) parameter(0)
  ROOT %loop = (s32[], f32[8,128]) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_a_kernel_costs_what_it_says_as_often_as_it_runs():
    found = cost(KERNELS, ONE)
    assert (found.flops, found.hbm_bytes) == (3 * 1000, 3 * 500)
    assert found.kernels == ("jit(f)/told", "jit(f)/quiet") and found.untold == ("jit(f)/quiet",)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="without an entry"):
        cost("nothing", ONE)
    with pytest.raises(ValueError, match="without groups"):
        replica_groups("channel_id=1", 4)


def test_groups_of_another_mesh_than_the_given_are_refused():
    assert np.array_equal(replica_groups("replica_groups=mesh['a'=4] {'a'}", 4), [[0, 1, 2, 3]])
    with pytest.raises(ValueError, match="cannot read"):
        replica_groups("replica_groups=mesh['a'=2] {'a'}", 4)
