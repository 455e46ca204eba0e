"""Compiled programs in the user's cache: the next engine loads them, and what does not fit is compiled again."""

import jax
import jax.numpy as jnp
import pytest

from jddtree.serving import kept_programs
from jddtree.serving.kept_programs import KeptPrograms

WEIGHTS = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A function that opens the programs of a configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda program="x", weights=WEIGHTS: KeptPrograms(program, weights, "float32")


def doubled() -> jax.stages.Compiled:
    """A compiled program."""
    return jax.jit(lambda x: x * 2).lower(jnp.ones(3)).compile()


def test_what_was_kept_is_loaded_and_gives_the_same(kept) -> None:
    assert kept().load("double") is None
    kept()._save("double", doubled())
    assert kept().load("double")(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_another_configuration_or_source_has_its_own_programs(kept, monkeypatch) -> None:
    kept()._save("double", doubled())
    assert kept("y").load("double") is None
    assert kept(weights={"a": jax.ShapeDtypeStruct((4,), jnp.float32)}).load("double") is None
    monkeypatch.setattr(kept_programs, "sources", lambda: "changed")
    assert kept().load("double") is None


def test_a_damaged_file_is_none(kept) -> None:
    kept()._save("double", doubled())
    path = kept().folder / "double"
    path.write_bytes(path.read_bytes()[:100])
    assert kept().load("double") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(kept, tmp_path) -> None:
    (tmp_path / "jddtree").write_text("a file where the folder should be")
    kept()._save("double", doubled())
    assert kept().load("double") is None
