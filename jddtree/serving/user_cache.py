"""The user's cache folder: compiled programs and measured costs."""

import os
from pathlib import Path

import jax


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jddtree or ~/.cache/jddtree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jddtree"


def use_compile_cache(wanted: bool) -> None:
    """Keep compiled programs in the cache folder, or where JAX_COMPILATION_CACHE_DIR says; not at all if
    unwanted.
    """
    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
