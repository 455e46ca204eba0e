"""The cost table that a budget of "auto" goes by: from the user's cache, or measured now and cached."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jddtree.decoding.calibration import Calibration
from jddtree.decoding.costs import UNKNOWN, CostTable, read_costs, table_of
from jddtree.decoding.engine import Engine
from jddtree.errors import UserError
from jddtree.parallel.processes import from_first
from jddtree.results import card
from jddtree.serving.cost_measurement import context_bucket, measure
from jddtree.serving.user_cache import cache_folder


def equip(
    engine: Engine,
    calibration: Calibration | None,
    costs: CostTable | None,
    measured_for: tuple[Sequence[int], int] | None,
    cached: bool,
) -> None:
    """Set what an engine plans with. calibration: None leaves its own; costs: None leaves those it has, and
    measures where it has none.

    measured_for: a prompt and tokens as in `cost_table`, None where no request needs costs; cached likewise.
    """
    if calibration is not None:
        engine.calibration = calibration
    if costs is not None:
        engine.costs = costs
    elif measured_for is not None and engine.costs is UNKNOWN:
        prompt, tokens = measured_for
        engine.costs = cost_table(engine, prompt, tokens, cached)


def cost_table(engine: Engine, prompt: Sequence[int], tokens: int, cached: bool) -> CostTable:
    """The table for texts of about `tokens` tokens that start with `prompt`, measured on this machine.

    cached: keep what is measured beside the compiled programs, per card, model, mesh and compiled shapes.
    Every process of a run gets the table of the first.
    """
    bucket = context_bucket(tokens, engine.program.capacity.context)
    path = cache_folder() / "costs" / f"{_key(engine, bucket)}.json"
    known = from_first("cost-cache", _read(path) if cached else "")
    if known:
        return table_of(json.loads(known))
    table = measure(engine, prompt, bucket)
    text = from_first("cost-table", json.dumps(table.record(), indent=1) + "\n")
    if cached:
        _write(path, text)
    return table_of(json.loads(text))


def _key(engine: Engine, bucket: int) -> str:
    layout = jax.tree.map(
        lambda array: (
            (array.shape, str(array.dtype), str(array.sharding.spec))
            if engine.mesh is not None
            else (array.shape, str(array.dtype))
        ),
        engine.weights,
    )
    mesh = engine.mesh.size if engine.mesh is not None else 1
    parts = (card(), jax.__version__, mesh, bucket, engine.program, jax.tree.leaves(layout))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> str:
    """The text of a cached table, empty where there is none that can be used"""
    try:
        read_costs(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UserError):
        return ""


def _write(path: Path, text: str) -> None:
    """Keep a table; a cache that cannot be written is none"""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        return
