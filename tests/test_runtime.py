"""Process-wide settings."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.runtime import collectives_need_compiling

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm import runtime
from jaxrl_llm.parallel.mesh import make_mesh

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
runtime.configure()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

@jax.jit
def alone(x):
    return jnp.sin(x).sum()

@jax.jit
def together(x):
    return jnp.cos(x).sum()

x = jnp.arange(16.0)
alone(x)
spread = jax.device_put(x, NamedSharding(make_mesh(data=8), PartitionSpec("data")))
assert abs(float(together(spread)) - float(jnp.cos(x).sum())) < 1e-5
"""


def test_programs_over_cpu_devices_are_not_read_from_the_cache(tmp_path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True)
        names = [path.name for path in tmp_path.iterdir()]
        assert any(name.startswith("jit_alone") for name in names)
        assert not [name for name in names if name.startswith("jit_together")]


@pytest.mark.parametrize(("count", "enabled"), [(1, True), (2, False)])
def test_one_device_keeps_the_cache(count, enabled):
    jax.config.update("jax_enable_compilation_cache", True)
    collectives_need_compiling(iter(jax.devices()[:count]))
    assert jax.config.jax_enable_compilation_cache is enabled


def test_a_mesh_over_all_cpu_devices_turns_the_cache_off():
    jax.config.update("jax_enable_compilation_cache", True)
    spread = jax.device_put(jnp.ones(8), NamedSharding(make_mesh(data=8), PartitionSpec("data")))
    assert not jax.config.jax_enable_compilation_cache
    assert float(spread.sum()) == 8
