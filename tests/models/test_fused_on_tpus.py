"""The attention kernels compiled for TPUs that are not there: shapes of real models, short rows and long ones that are split.

Without libtpu, see tests/sampler/test_tpu_programs.py, there is nothing to compile with.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import is_fused, segment_attention, sight_for
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import layout_of
from jaxrl_llm.planning.hlo import cost

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None

CASES = [  # topology, mesh, rows, tokens, (query heads, key/value heads, head dim), dtype
    ("v5e:2x2", {"fsdp": 2}, 2, 2048, (9, 3, 64), "bfloat16"),
    ("v6e:2x2", {}, 1, 2064, (16, 8, 128), "float32"),
    ("v5p:2x2x1", {"context": 2, "tensor": 2}, 1, 131_072, (32, 8, 128), "bfloat16"),
]

if HAS_LIBTPU:

    @pytest.mark.slow
    @pytest.mark.parametrize(("topology", "sizes", "rows", "tokens", "heads", "dtype"), CASES)
    def test_forward_and_backward_compile_and_keep_no_scores(
        monkeypatch, topology, sizes, rows, tokens, heads, dtype
    ):
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        from jax.experimental import topologies

        chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = make_mesh(**sizes, devices=chips[: int(np.prod([1, *sizes.values()]))])
        layout, (H, N, K) = layout_of(mesh), heads
        assert is_fused(layout) and not is_fused()

        def loss(q, k, v, segments):
            out = segment_attention(q, k, v, sight_for(segments, layout=layout), layout=layout)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        def abstract(shape, dtype, sharding):
            return jax.ShapeDtypeStruct((rows, tokens, *shape), dtype, sharding=sharding)

        given = [abstract((n, K), dtype, layout.heads) for n in (H, N, N)]
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given, abstract((), "int32", layout.tokens))
        compiled = lowered.compile()
        found = cost(compiled.as_text(), dict(mesh.shape))
        assert len(found.kernels) == 3 and not found.untold
        # 9 products of the pairs that see each other (2 forward, 3 and 4 backward, which compute the scores again), on the
        # last device of those that share a row; a block that the diagonal or the end of a row crosses counts whole.
        mine, there = tokens // sizes.get("context", 1), tokens
        pairs = mine * (there - mine / 2)
        wanted = 9 * 2 * K * pairs * rows * H / sizes.get("fsdp", 1) / sizes.get("tensor", 1)
        assert wanted <= found.flops <= (2 if tokens < 4096 else 1.02) * wanted
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        assert temporaries < mine * there * H / sizes.get(
            "tensor", 1
        )  # a byte a pair and head; of a score, 4 bytes
