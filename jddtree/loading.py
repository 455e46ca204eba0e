"""From checkpoint folders to a `Model`: configurations, weights on the device, tokenizer and chat template.

Without folders the bundled micro pair is loaded: a small trained K2.6-shaped target and its drafter.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from converters.checkpoint import Report
from converters.drafters import format_of, read_config
from converters.kimi import KimiReader
from converters.pieces import Reader, check_values
from converters.placement import device_bytes, load_arrays, require_memory
from converters.store import Store, is_store
from jddtree.config import DrafterConfig, TargetConfig, check_pair, target_config
from jddtree.decoding.calibration import UNCALIBRATED, Calibration, read_calibration
from jddtree.drafter_kinds import without_folder
from jddtree.errors import UserError
from jddtree.models.parameters import Tree, nest
from jddtree.parallel.mesh import EXPERT_LAYOUTS, make_mesh
from jddtree.parallel.partition import on_mesh, spec
from jddtree.text.chat import ChatTemplate
from jddtree.text.stops import stop_ids
from jddtree.text.tokenizer import Tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Defaults:
    """How a model likes to be asked where the caller does not say.

    thinking: of the chat template. raw_prefix: ids put before a raw prompt. prompt: what to run when none is given,
    raw. calibration: what the drafter's scores are worth.
    """

    thinking: bool = True
    raw_prefix: tuple[int, ...] = ()
    prompt: str | None = None
    calibration: Calibration = UNCALIBRATED


@dataclass(frozen=True)
class Model:
    """A target with or without a drafter, ready to compile.

    weights: {"target": tree, "drafter": tree} on the device or split over `mesh`, without "drafter" where it has no
    weights; dtype: compute dtype; stop_ids: ids that end an answer.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    weights: Tree
    dtype: jnp.dtype
    mesh: Mesh | None
    tokenizer: Tokenizer
    chat: ChatTemplate
    stop_ids: tuple[int, ...]
    defaults: Defaults
    load_seconds: float
    reports: tuple[Report, ...]


def bundled(part: str) -> Path:
    """Folder of the bundled "target" or "drafter"."""
    return Path(str(files("jddtree") / "assets" / "micro" / part))


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    dtype: str = "auto",
    with_drafter: bool = True,
    mesh: int | None = None,
    expert_layout: str = "tensor",
    check: bool = False,
    latent_norm_eps: float | None = None,
    drafter_options: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Model:
    """Load a Kimi K2.6 checkpoint folder, or a store, and a drafter.

    target: None is the bundled micro pair. draft: a drafter's folder, or the name of one without weights ("ngram");
    None is the bundled drafter for the bundled target, else that of the store, else no drafter.
    dtype: "float32", "bfloat16", or "auto" (bfloat16 on an accelerator). with_drafter: False leaves a drafter out.
    mesh: devices to split the model over; None is all accelerators, or one CPU. expert_layout: "tensor" (a slice of
    every expert on each rank) or "expert" (whole experts). check: compare a store's files with their checksums first.
    latent_norm_eps, drafter_options: switches of `target_config` and of the drafter's `Format.config`.
    progress: called with ("checksums", "target" or "drafter", bytes done, bytes in all).
    Raises UserError for anything wrong with the folders, and for a drafter made for another target.
    """
    begun = time.perf_counter()
    target_folder, draft_folder, store = _folders(target, draft)
    if check and store is not None:
        store.check(None if progress is None else partial(progress, "checksums"))
    config = target_config(target_folder, latent_norm_eps=latent_norm_eps)
    drafter = _drafter(draft, draft_folder, drafter_options or {}) if with_drafter else None
    if drafter is not None:
        check_pair(config, drafter)
    tokenizer = _tokenizer(target_folder, config)
    compute, devices = _dtype(dtype), _mesh(mesh, expert_layout)
    readers: dict[str, Reader] = {"target": _target_reader(store, target_folder, config)}
    if drafter is not None and draft_folder:
        stored = store is not None and draft_folder == store.folder("drafter")
        from_folder = format_of(drafter).reader
        readers["drafter"] = store.reader("drafter") if store and stored else from_folder(draft_folder, drafter)
    weights = _weights(readers, np.dtype(compute), devices, expert_layout, config.num_moe_layers, progress)
    return Model(
        target=config,
        drafter=drafter,
        weights=jax.block_until_ready(weights),
        dtype=compute,
        mesh=devices,
        tokenizer=tokenizer,
        chat=ChatTemplate.from_directory(target_folder),
        stop_ids=stop_ids(target_folder, tokenizer),
        defaults=_bundled_defaults(own_drafter=draft is None) if target is None else Defaults(),
        load_seconds=time.perf_counter() - begun,
        reports=tuple(reader.report(np.dtype(compute)) for reader in readers.values()),
    )


def _weights(
    readers: dict[str, Reader],
    dtype: np.dtype,
    mesh: Mesh | None,
    layout: str,
    layers: int,
    progress: Callable[[str, int, int], None] | None,
) -> Tree:
    """Every part's arrays on the device or the mesh, once it is known that they fit"""
    tables, sharding_of = {part: reader.table for part, reader in readers.items()}, None
    if mesh is not None:
        tables = {part: on_mesh(dict(table), mesh.size, layout, layers) for part, table in tables.items()}
        sharding_of = lambda path, parameter: NamedSharding(mesh, spec(parameter))
    require_memory([device_bytes(table, dtype, sharding_of) for table in tables.values()])
    report = lambda part: None if progress is None else partial(progress, part)
    return {
        part: nest(load_arrays(reader, dtype, sharding_of, placed=tables[part], progress=report(part)))
        for part, reader in readers.items()
    }


def _tokenizer(folder: Path, config: TargetConfig) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but the model's vocab_size is "
            f"{config.vocab_size}; use the files of one model"
        )
    return tokenizer


def _mesh(count: int | None, expert_layout: str) -> Mesh | None:
    """The mesh to load onto; None for one device"""
    if expert_layout not in EXPERT_LAYOUTS:
        raise UserError(f"--expert-layout is {expert_layout!r}, but must be one of {', '.join(EXPERT_LAYOUTS)}")
    if count is None and jax.default_backend() == "cpu" and jax.process_count() == 1:
        count = 1
    made = make_mesh(count)
    return made if made.size > 1 else None


def _folders(target: str | Path | None, draft: str | Path | None) -> tuple[Path, Path | None, Store | None]:
    """Folders of target and drafter, and the store where the target is one; its drafter is the default then."""
    folder = None if draft is None or without_folder(draft) is not None else Path(draft)
    if target is None:
        return bundled("target"), bundled("drafter") if draft is None else folder, None
    store = Store(Path(target)) if is_store(Path(target)) else None
    if draft is None and store is not None and "drafter" in store.parts:
        return store.folder("target"), store.folder("drafter"), store
    return store.folder("target") if store else Path(target), folder, store


def _drafter(draft: str | Path | None, folder: Path | None, switches: dict[str, Any]) -> DrafterConfig | None:
    """The configuration of a drafter's folder, or the one that a name stands for"""
    if folder is not None:
        return read_config(folder, **switches)
    return None if draft is None else without_folder(draft, **switches)


def _target_reader(store: Store | None, folder: Path, config: TargetConfig) -> Reader:
    if store is not None:
        return store.reader("target")
    reader = KimiReader(folder, config)
    check_values(reader)
    return reader


def _dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise UserError(f"--dtype is {name!r}, but must be one of auto, {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name])


def _bundled_defaults(own_drafter: bool) -> Defaults:
    folder = bundled("target").parent
    values = json.loads((folder / "defaults.json").read_text(encoding="utf-8"))
    calibration = read_calibration(folder / "calibration.json") if own_drafter else UNCALIBRATED
    return Defaults(values["thinking"], tuple(values["raw_prefix"]), values["prompt"], calibration)
