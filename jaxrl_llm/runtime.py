"""Process-wide settings of JAX, made once before anything is compiled."""

from __future__ import annotations

from jaxrl_llm.models.formats.cache import cache_root

__all__ = ["configure"]


def configure() -> None:
    """Turns the persistent compilation cache on, unless the user has chosen another or none.

    It lies in the cache folder (`models.formats.cache.cache_root`). Set JAX_ENABLE_COMPILATION_CACHE=false to go without, JAX_COMPILATION_CACHE_DIR to move it.
    """
    import jax

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
