"""Checkpoint folders of the tests: copies that are edited, with shards and indices written anew."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters.checkpoint import DTYPES, INDEX_NAME, Checkpoint

SHARD = "model-00001-of-000004.safetensors"
Edit = Callable[[dict[str, np.ndarray]], None]


def copy_folder(source: Path, tmp_path: Path) -> Path:
    """A writable copy of a checkpoint folder."""
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


def write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file written without the library, so that any dtype goes in."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(
        struct.pack("<Q", len(raw)) + raw + b"".join(array.tobytes() for array in tensors.values())
    )


def edit_folder(folder: Path, edit: Edit, *, index: bool = True) -> Path:
    """Rewrite a folder after `edit` changed its tensors; a new tensor goes to the last shard."""
    checkpoint = Checkpoint(folder)
    tensors = {name: checkpoint.read(name).copy() for name in checkpoint.entries}
    edit(tensors)
    shards: dict[str, dict[str, np.ndarray]] = {shard: {} for shard in checkpoint.shards}
    for name, array in tensors.items():
        entry = checkpoint.entries.get(name)
        shards[entry.shard if entry else checkpoint.shards[-1]][name] = array
    for shard, content in shards.items():
        write_shard(folder / shard, content)
    if checkpoint.index is not None:
        write_index(folder, {name: shard for shard, content in shards.items() for name in content})
    if not index:
        (folder / INDEX_NAME).unlink()
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int | None = None) -> None:
    """An index file; total_size None leaves the metadata out."""
    metadata = {} if total_size is None else {"metadata": {"total_size": total_size}}
    (folder / INDEX_NAME).write_text(json.dumps({**metadata, "weight_map": dict(weight_map)}))
