"""Strict JAX settings for every test, eight CPU devices, and where the reference data is."""

import os
from pathlib import Path

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def golden_ref() -> Path:
    """Folder of the reference arrays: ../shared/golden/ref, else the copy bundled with the tests."""
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
