"""Model folders and logits that the tests of this folder share."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.params import init_params


@pytest.fixture(scope="session")
def logits():
    """(params, config, tokens [B, T]) -> f32[B, T, V]."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(params, tokens, config):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = forward(params, config, tokens, positions, jnp.ones_like(tokens))
        return hidden @ head_weight(params, config)

    return lambda params, config, tokens: np.asarray(run(params, jnp.asarray(tokens), config))


@pytest.fixture
def hf_folder(tmp_path):
    """Makes a small model folder; `edit` changes its tensors (numpy, HF names) and its config."""

    def make(name="hf", *, edit=None, config_edit=None, **changes):
        config = dataclasses.replace(TINY, **changes)
        folder = save_hf(config, init_params(config, jax.random.key(1)), None, tmp_path / name)
        if edit is not None:
            tensors = load_file(folder / "model.safetensors")
            edit(tensors)
            save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
        if config_edit is not None:
            raw = json.loads((folder / "config.json").read_text())
            config_edit(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return make
