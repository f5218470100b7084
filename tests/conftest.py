"""Shared set-up: 8 virtual CPU devices and a compilation cache."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
    pathlib.Path(tempfile.gettempdir()) / "jaxrl_llm_test_cache"
)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.config import load_config
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.train import train

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture(scope="module", autouse=True)
def cache_turned_off_for_this_module_only():
    """Turns the compilation cache on again where a mesh has turned it off (`runtime.collectives_need_compiling`)."""
    enabled = jax.config.jax_enable_compilation_cache
    yield
    if enabled and not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """tests/data: vectors and golden values that the tests read."""
    return DATA


@pytest.fixture(scope="session")
def tiny_params():
    """Random parameters of `TINY`, f32."""
    return init_params(TINY, jax.random.key(0))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> pathlib.Path:
    """Folder of a whole run of configs/tiny.yaml. Made once: copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert train(load_config(CONFIGS / "tiny.yaml"), folder) == 0
    return folder
