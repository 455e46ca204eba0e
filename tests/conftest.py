"""Strict JAX settings for every test, eight CPU devices, one cache of compiled programs, where the reference
data is, and shared engines.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# These compile in a quarter of the time, and what they make runs as fast.
COMPILE_FLAGS = (
    "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=4 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling"
)
# Ranks wait for one another as long as a busy machine takes: XLA would end a process 40 s too late.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
FLAGS = f"--xla_force_host_platform_device_count=8 {COMPILE_FLAGS} {PATIENCE}"
CACHE = "JAX_COMPILATION_CACHE_DIR"
# A worker inherits them; twice would be another key of the cache.
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else workers and the commands that tests start would compile the same programs again.
if CACHE not in os.environ:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jddtree-xla-")
    atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Of NumPy: threads of two workers wait for one another, spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from harness import SMALL, WIDE, Pair, compilations, load_pair  # noqa: E402

from jddtree.decoding.engine import Engine  # noqa: E402
from jddtree.decoding.state import Capacity  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def compiled_programs_are_kept():
    """A command that a test runs in this process may turn JAX's cache off; it is on again for the next."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])


ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def golden_ref() -> Path:
    """Folder of the reference arrays: $JDDTREE_GOLDEN, else ../shared/golden/ref, else the copy in
    tests/golden.
    """
    if given := os.environ.get("JDDTREE_GOLDEN"):
        return Path(given)
    shared = SHARED / "golden" / "ref"
    return shared if shared.is_dir() else ROOT / "tests" / "golden"


def micro_target() -> Path:
    """The micro target checkpoint that is installed with the package."""
    return ROOT / "jddtree" / "assets" / "micro" / "target"


def micro_drafter() -> Path:
    """The micro drafter checkpoint that is installed with the package."""
    return ROOT / "jddtree" / "assets" / "micro" / "drafter"


def official_dir() -> Path | None:
    """Official K2.6 tokenizer and configuration, when present; they are never copied into the project."""
    path = SHARED / "kimi-k2.6"
    return path if path.is_dir() else None


@pytest.fixture(scope="session")
def golden() -> Path:
    """See `golden_ref`."""
    return golden_ref()


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The micro pair in float32, with the eps of the reference arrays."""
    return load_pair(micro_target(), micro_drafter(), np.float32)


@pytest.fixture(scope="session")
def engines(pair: Pair) -> Callable[..., Engine]:
    """A function that gives the engine of a capacity, compiled once; arguments are Capacity's fields."""
    made: dict[Capacity, Engine] = {}

    def engine(**fields: int) -> Engine:
        capacity = Capacity(**fields)
        if capacity not in made:
            made[capacity] = pair.engine(capacity)
        return made[capacity]

    return engine


@pytest.fixture(scope="session")
def small(engines) -> Engine:
    """Four sequences, the smallest useful tree, chunks and contexts that short prompts fill."""
    return engines(**SMALL)


@pytest.fixture(scope="session")
def wide(pair: Pair) -> tuple[Engine, list[str]]:
    """Seven sequences and trees of up to 64 nodes, and the compilations that making it took."""
    with compilations() as events:
        engine = pair.engine(Capacity(**WIDE))
    return engine, list(events)


@pytest.fixture(scope="session")
def cases() -> list[dict[str, Any]]:
    """The reference's decoding traces."""
    return json.loads((golden_ref() / "traces.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def micro_target_dir() -> Path:
    """See `micro_target`."""
    return micro_target()
