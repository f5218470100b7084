"""The decode and prefill programs, compiled for TPUs that are not there: libtpu needs none to compile.

`[dev]` brings libtpu where Google builds it and JAX's version of it can do this: Linux on x86-64 with Python 3.12 or
later. Elsewhere this file has one test less, the first, and nothing to compile with.
"""

import functools
import importlib.util
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import attention_path
from jaxrl_llm.sampler.sampling import RowSampling

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    tie_embeddings=False,
    max_positions=8192,
    dtype="bfloat16",
)
# 3 key/value heads of 64: padded to 4 heads of 128.
SMOLLM2 = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    dtype="bfloat16",
)
SLOTS, PAGES, PAGE, WIDTH = 64, 257, 64, 32

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
EXPECTED = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 12)

if EXPECTED:

    def test_libtpu_is_there_to_compile_with():
        assert HAS_LIBTPU, "libtpu is missing: pip install -e '.[dev]' again"


@functools.cache
def mesh_of(topology):
    """One chip of a topology, as a mesh."""
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.Mesh(np.array(chips[:1]), ("chip",))


def programs(config, topology, *, weights="compute", kv="compute"):
    """{name: compiled program}, and the bytes of the pages."""
    mesh = mesh_of(topology)
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def abstract(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=there)

    path = attention_path(config, "tpu", kv=kv)
    params = abstract_params(config, "bfloat16")
    prepared = abstract(jax.eval_shape(lambda p: decode.prepare_for_sampling(p, config, weights), params))
    state = jax.eval_shape(
        lambda: decode.init_state(config, SLOTS, PAGES, PAGE, WIDTH, kv=kv, path=path.name)
    )
    cache = abstract(state.cache)
    rows = {
        name: abstract(getattr(state, name))
        for name in ("table", "token", "position", "limit", "floor", "active", "keys")
    }
    rows["sampling"] = abstract(jax.eval_shape(lambda: RowSampling.uniform(SLOTS)))
    ids = jax.ShapeDtypeStruct((config.vocab_size,), bool, sharding=there)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        generate = decode._generate.lower(
            prepared, config, cache, rows, ids, ids, None, i32(), steps=8, truncate=False, raw=False, top=0
        )
        prefill = decode.prefill.lower(prepared, config, cache, i32(8, PAGE), i32(8), i32(8), i32(8, WIDTH))
    pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    return path, {"generate": generate.compile(), "prefill": prefill.compile()}, pages


# A bfloat16 model of 8 billion parameters does not fit beside its pages into the 16 GB of a v5e chip; in int8 it does.
CASES = [
    ("v5e:2x2", LLAMA_8B, "int8", "compute"),
    ("v5p:2x2x1", LLAMA_8B, "compute", "compute"),
    ("v6e:2x2", LLAMA_8B, "compute", "compute"),
    ("v5e:2x2", SMOLLM2, "compute", "compute"),
    ("v5e:2x2", SMOLLM2, "fp8", "int8"),
]

if HAS_LIBTPU:

    @pytest.mark.slow
    @pytest.mark.parametrize(("topology", "config", "weights", "kv"), CASES)
    def test_whole_programs_compile_for_tpus_with_the_kernel_and_without_a_copy_of_the_pages(
        monkeypatch, topology, config, weights, kv
    ):
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        path, compiled, pages = programs(config, topology, weights=weights, kv=kv)
        assert path.name == ("ragged_paged_attention" if kv == "compute" else "blockwise"), path
        for name, program in compiled.items():
            text, memory = program.as_text(), program.memory_analysis()
            print(topology, name, memory.argument_size_in_bytes, memory.temp_size_in_bytes, pages)
            assert ("ragged_paged_attention_kernel" in text) == (kv == "compute"), name
            assert memory.alias_size_in_bytes >= pages, name  # donated, and written in place
            assert memory.temp_size_in_bytes < pages, (name, memory.temp_size_in_bytes, pages)
