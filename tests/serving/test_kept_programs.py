"""Kept programs: the next engine loads them, and what does not fit or is damaged is compiled again."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jddtree
from jddtree.serving import kept_programs as module
from jddtree.serving.engines import compile_engine
from jddtree.serving.kept_programs import KeptPrograms, kept_programs

WEIGHTS = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}


@dataclass(frozen=True)
class Shapes:
    """Stands for a program, of which only the repr counts."""

    name: str
    observer: object = None


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder where JAX keeps its programs, and nobody else."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def kept(cached: Path) -> Callable[..., KeptPrograms]:
    """A function that opens the programs of a configuration."""

    def programs(name: str = "x", weights: dict = WEIGHTS) -> KeptPrograms:
        return kept_programs(Shapes(name), weights, "float32")

    return programs


def doubled(kept: KeptPrograms) -> jax.stages.Compiled:
    """A compiled program."""
    with kept.apart_from_jax():
        return jax.jit(lambda x: x * 2).lower(jnp.ones(3)).compile()


def test_what_was_kept_is_loaded_and_gives_the_same(kept) -> None:
    assert kept().load("double") is None
    kept()._save("double", doubled(kept()))
    assert kept().load("double")(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_another_configuration_or_source_has_its_own_programs(kept, monkeypatch) -> None:
    kept()._save("double", doubled(kept()))
    assert kept("y").load("double") is None
    assert kept(weights={"a": jax.ShapeDtypeStruct((4,), jnp.float32)}).load("double") is None
    with jax.default_matmul_precision("highest"):
        assert kept().load("double") is None
    monkeypatch.setattr(module, "sources", lambda: "changed")
    assert kept().load("double") is None


def test_a_damaged_file_is_none(kept) -> None:
    kept()._save("double", doubled(kept()))
    path = kept().folder / "double"
    path.write_bytes(path.read_bytes()[:100])
    assert kept().load("double") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(kept, cached: Path) -> None:
    (cached / module.FOLDER).write_text("a file where the folder should be")
    kept()._save("double", doubled(kept()))
    assert kept().load("double") is None


def test_the_oldest_are_forgotten(kept, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_ENGINES", 2)
    program = doubled(kept())
    for name in "abc":
        kept(name)._save("double", program)
    assert [kept(name).load("double") is not None for name in "abc"] == [False, True, True]


def test_nothing_is_kept_beside_a_bucket(cached: Path) -> None:
    """JAX's cache may be one; a folder of that name would stand wherever the command was started."""
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert kept_programs(Shapes("x"), WEIGHTS, "float32") is None


def test_nothing_is_kept_without_a_cache_or_under_an_observer(cached: Path) -> None:
    assert kept_programs(Shapes("x", observer=print), WEIGHTS, "float32") is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert kept_programs(Shapes("x"), WEIGHTS, "float32") is None


def test_an_engine_of_kept_programs_writes_the_same_and_traces_nothing(cached: Path, monkeypatch) -> None:
    model = jddtree.load()
    capacity = jddtree.Capacity(rows=16, candidates=15, context=64, chunk=8)
    request = jddtree.Request(prompt=(1, 2, 3), max_tokens=12, budget=15)
    texts = []
    for run in range(2):
        engine = compile_engine(model, capacity)
        texts.append([dispatch.tokens for dispatch in engine.decode([request])])
        if run == 0:
            wait_for_saves(cached / module.FOLDER)
            monkeypatch.setattr(jddtree.Engine, "_lower", None)
            monkeypatch.setattr(jddtree.Engine, "_lower_empty", None)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1


def wait_for_saves(folder: Path) -> None:
    """Until the three programs of one engine are there: they are written beside what follows."""
    for _ in range(600):
        names = sorted(path.name for path in folder.glob("*/*"))
        if names == ["empty", "prefill", "rounds"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"kept only {names}")
