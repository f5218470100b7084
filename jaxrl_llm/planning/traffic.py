"""What an update has to send over a mesh, by formula: to rank meshes before anything is compiled, and to judge what is."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.parallel.mesh import BATCH_AXES

__all__ = ["least_traffic"]


def least_traffic(
    model: ModelConfig, mesh: Mapping[str, int], *, rows: int, tokens: int, micro_rows: int
) -> dict[str, float]:
    """Bytes that a chip sends in one update, by axis of the mesh, when nothing is sent twice.

    Weights are in 2 bytes, gradients in 4, and each collective sends what the best algorithm for it sends: (n - 1) / n of the
    whole for a gather or a scattered sum over n chips, twice that for a sum that all receive. In every micro-batch a layer's
    weights are gathered forward and once more backward, where the layer is recomputed, and its gradient is summed to where
    its shards lie. The head is gathered once an update. The residual stream is summed over the tensor axis twice a layer
    forward and twice backward, and once where it is recomputed (the last sum is not needed again); once for the embedding and
    once for the head.

    Args:
      mesh: sizes of the axes.
      rows: of the batch of the update.
      tokens: of a row.
      micro_rows: rows of one forward and backward pass on all chips together.
    """
    data, fsdp, expert, context, tensor = (
        mesh[axis] for axis in ("data", "fsdp", "expert", "context", "tensor")
    )
    shards = fsdp * context  # of the parameters
    turns = -(-rows // micro_rows)
    here = (
        micro_rows // math.prod(mesh[axis] for axis in BATCH_AXES) * tokens / context
    )  # tokens of a chip at a time
    L, D = model.num_layers, model.hidden_size
    table = model.vocab_size * D / tensor
    mixture = L * model.mlp_parameters if model.num_experts else 0
    rest = model.num_parameters - mixture - (1 if model.tie_embeddings else 2) * model.vocab_size * D
    layers = (rest + mixture / expert) / tensor
    copies = data * (1 if model.num_experts else expert)
    apart = (shards - 1) / shards

    moved = 2 * here * D * 2 * apart  # looked-up embeddings go to their rows, and their gradients back
    over_shards = apart * (turns * (layers * (2 + 2 + 4) + table * 4) + table * 2) + turns * moved
    parameters = layers + table * (1 if model.tie_embeddings else 2)
    stream = here * D * 2
    keys = here * context * model.num_kv_heads / tensor * model.head_dim * 2 * 2  # of all tokens of the rows
    return {
        "data": 2 * turns * 4 * parameters / shards * (copies - 1) / copies,
        "fsdp": over_shards,
        # Each token goes to all shards of the experts and comes back as a sum of 4 bytes; forward and backward, and where the
        # layer is recomputed it goes there again.
        "expert": turns * here * D * (2 + 4 + 2 + 2 + 4) * L * (expert - 1) if model.num_experts else 0.0,
        # Keys and values are gathered three times a layer, their gradients summed once.
        "context": turns * L * keys * 4 * (context - 1) / context,
        "tensor": turns * stream * (5 * L + 2) * 2 * (tensor - 1) / tensor,
    }
