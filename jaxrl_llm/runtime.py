"""Process-wide settings of JAX."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.models.formats.cache import cache_root

__all__ = ["collectives_need_compiling", "configure"]


def collectives_need_compiling(devices: Iterable[jax.Device]) -> None:
    """Turns the persistent compilation cache off if these are several CPU devices. `make_mesh` calls it.

    XLA:CPU forgets the order of a program's collectives when it writes the program to the cache (jaxlib 0.10 and
    0.12). A program that is read back may run independent collectives in another order on each device; they then
    wait for each other for ever, and XLA aborts the process after 60 s. A compiled program keeps the order.
    Call it yourself before you compile for a mesh of CPU devices that `make_mesh` has not made.
    """
    devices = list(devices)
    if len(devices) > 1 and devices[0].platform == "cpu" and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX has decided at its first compilation whether there is a cache


def configure() -> None:
    """Turns the persistent compilation cache on, unless the user has chosen another or none.

    It lies in the cache folder (`models.formats.cache.cache_root`). Set JAX_ENABLE_COMPILATION_CACHE=false to go
    without, JAX_COMPILATION_CACHE_DIR to move it.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
