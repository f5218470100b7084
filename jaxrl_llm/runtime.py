"""Process-wide settings of JAX, made once before anything is compiled."""

from __future__ import annotations

import os
import re

from jaxrl_llm.models.formats.cache import cache_root

__all__ = ["configure", "virtual_devices_need_threads"]


def virtual_devices_need_threads() -> None:
    """Gives JAX's CPU client threads enough for several virtual devices. Call it before JAX lists its devices.

    A virtual device that waits in a collective holds a thread, and XLA runs independent collectives of a program
    in any order. With one thread a device, its default on a small machine, half of the devices can wait in one
    and half in another for ever; after 60 s XLA aborts the process (seen on 2 cores under load, 8 devices). It
    reads the number of threads from NPROC; a value that is already there is left.
    """
    import jax

    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max(int(forced[1]) if forced else 1, jax.config.jax_num_cpu_devices or 1)
    if devices > 1:
        os.environ.setdefault("NPROC", str(4 * devices))


def configure() -> None:
    """Turns the persistent compilation cache on, unless the user has chosen another or none.

    It lies in the cache folder (`models.formats.cache.cache_root`). Set JAX_ENABLE_COMPILATION_CACHE=false to go without, JAX_COMPILATION_CACHE_DIR to move it.
    """
    import jax

    virtual_devices_need_threads()
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
