"""The decode and prefill programs, compiled for TPUs that are not there: libtpu needs none to compile.

`.ci/run` installs libtpu (extra [tpu], 640 MB) before the slow tests where Google builds it and JAX's version of it can do
this: Linux on x86-64 with Python 3.12 or later. Elsewhere this file has nothing to compile with.
"""

import functools
import importlib.util
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import abstract_params
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import attention_path, init_pages
from jaxrl_llm.sampler.rules import Tables
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

    @pytest.mark.slow
    def test_libtpu_is_there_to_compile_with():
        assert HAS_LIBTPU, "libtpu is missing: pip install -e '.[tpu]'"


@functools.cache
def mesh_of(topology):
    """One chip of a topology, as a mesh."""
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.Mesh(np.array(chips[:1]), ("chip",))


def compile_for(topology, config, program, weights):
    """(what attends, the compiled program, the bytes of the pages), from shapes alone."""
    mesh = mesh_of(topology)
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def abstract(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=there)

    path = attention_path(config, "tpu")
    params = abstract_params(config, "bfloat16")
    prepared = abstract(jax.eval_shape(lambda p: decode.prepare_for_sampling(p, config, weights), params))
    cache = abstract(jax.eval_shape(lambda: init_pages(config, PAGES, PAGE, path=path.name)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if program == "prefill":
            lowered = decode.prefill.lower(
                prepared, config, cache, i32(8, PAGE), i32(8), i32(8), i32(8, WIDTH)
            )
        else:
            rows = {name: i32(SLOTS) for name in ("token", "position", "limit", "floor", "rule")}
            rows |= {"table": i32(SLOTS, WIDTH), "sampling": abstract(RowSampling.uniform(SLOTS))}
            rows["active"] = jax.ShapeDtypeStruct((SLOTS,), bool, sharding=there)
            rows["keys"] = jax.ShapeDtypeStruct((SLOTS, 2), jnp.uint32, sharding=there)
            ids = jax.ShapeDtypeStruct((1, config.vocab_size), bool, sharding=there)
            lowered = decode._generate.lower(
                prepared,
                config,
                cache,
                rows,
                Tables(stop=ids, halt=ids),
                i32(),
                None,
                steps=8,
                truncate=False,
                raw=False,
                top=0,
                support=0,
            )
        return path, lowered.compile(), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


# A bfloat16 model of 8 billion parameters does not fit beside its pages into the 16 GB of a v5e chip; in int8 it does.
CASES = [
    ("v6e:2x2", LLAMA_8B, "generate", "compute"),
    ("v5e:2x2", LLAMA_8B, "generate", "int8"),
    ("v5p:2x2x1", LLAMA_8B, "generate", "compute"),
    ("v5e:2x2", SMOLLM2, "prefill", "compute"),
]

if HAS_LIBTPU:

    @pytest.mark.slow
    @pytest.mark.parametrize(("topology", "config", "program", "weights"), CASES)
    def test_programs_compile_for_tpus_with_the_kernel_and_without_a_copy_of_the_pages(
        monkeypatch, topology, config, program, weights
    ):
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        began = time.process_time()
        path, compiled, pages = compile_for(topology, config, program, weights)
        memory = compiled.memory_analysis()
        gigabytes = [
            f"{x / 1e9:.2f}" for x in (memory.argument_size_in_bytes, memory.temp_size_in_bytes, pages)
        ]
        print(
            f"{topology} {config.num_layers} layers {program}, weights {weights}: {path.name}; arguments, "
            f"temporaries, pages {', '.join(gigabytes)} GB; {time.process_time() - began:.0f} s of CPU",
            flush=True,
        )
        assert path.name == "ragged_paged_attention", path
        assert "ragged_paged_attention_kernel" in compiled.as_text()
        assert memory.alias_size_in_bytes >= pages  # donated, and written in place
        assert memory.temp_size_in_bytes < pages
