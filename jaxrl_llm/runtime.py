"""Process-wide settings of JAX, made once before anything is compiled."""

from __future__ import annotations

import os
import pathlib

__all__ = ["cache_dir", "configure"]


def cache_dir() -> pathlib.Path:
    """Where downloads, dequantised weights and compiled programs are kept.

    The environment variable JAXRL_CACHE_DIR, else $XDG_CACHE_HOME/jaxrl_llm, else ~/.cache/jaxrl_llm.
    """
    chosen = os.environ.get("JAXRL_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxrl_llm"


def configure() -> None:
    """Turns the persistent compilation cache on, unless the user has chosen another or none.

    Set JAX_ENABLE_COMPILATION_CACHE=false to go without, JAX_COMPILATION_CACHE_DIR to move it.
    """
    import jax

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
