"""What a conversion will do: the parts, the blocks of work, and the fingerprint of the folders that it reads.

The fingerprint is in the manifest: names, sizes, and a digest of index, headers and small files. Times of change are
kept beside it only while a conversion runs, to notice a source that changes under it.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from converters.checkpoint import INDEX_NAME, mismatch
from converters.drafters import DrafterReader, format_of, read_config
from converters.kimi import KimiReader
from converters.manifest import part_files
from converters.pieces import BLOCK_BYTES, STORED, Block, TensorReader, in_file_order, layout
from jddtree.config import check_pair, target_config

COPIED = (  # where a folder has them
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
)


@dataclass(frozen=True)
class PartPlan:
    """One folder to convert.

    sizes: bytes of every .bin file, by path in the part's folder. faults: phrases about tensors that do not fit.
    source: the fingerprint. stamps: time of change of every file that is read, in nanoseconds.
    """

    name: str
    folder: Path
    reader: TensorReader
    faults: tuple[str, ...]
    sizes: Mapping[str, int]
    source: Mapping[str, Any]
    stamps: Mapping[str, int]

    @property
    def copied(self) -> tuple[str, ...]:
        """Small files to copy."""
        return tuple(name for name in COPIED if name in self.stamps)


@dataclass(frozen=True)
class Plan:
    """Everything to do; nothing is written by making it.

    blocks: (part, block) in the order of reading, empty where a part has faults.
    """

    parts: tuple[PartPlan, ...]
    blocks: tuple[tuple[PartPlan, Block], ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all .bin files."""
        return sum(sum(part.sizes.values()) for part in self.parts)

    def require_sound(self) -> None:
        """Raise UserError with all faults of the first part that has some."""
        for part in self.parts:
            if part.faults:
                raise mismatch(part.folder, list(part.faults))

    def identity(self) -> dict[str, Any]:
        """What must stay the same for an unfinished conversion to go on."""
        digest = hashlib.sha256(repr([(part.name, block) for part, block in self.blocks]).encode()).hexdigest()
        parts = {part.name: {**part.source, "changed": dict(part.stamps)} for part in self.parts}
        return {"block_bytes": BLOCK_BYTES, "blocks": digest, "parts": parts}


def make_plan(target: Path, draft: Path | None = None) -> Plan:
    """Plan the conversion of a target and, if given, its drafter.

    Raises UserError for a folder that cannot be read, a configuration that is not supported, and a drafter for another
    target. Tensors that are missing or not wanted are in `PartPlan.faults`.
    """
    target = Path(target)
    config = target_config(target)
    parts = [_part("target", target, KimiReader(target, config, check=False))]
    if draft is not None:
        drafter = read_config(draft := Path(draft))
        check_pair(config, drafter)
        parts.append(_part("drafter", draft, format_of(drafter).reader(draft, drafter, check=False)))
    blocks = [] if any(part.faults for part in parts) else [(part, block) for part in parts for block in _ordered(part)]
    return Plan(tuple(parts), tuple(blocks))


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two results of `Plan.identity`: names of files, with what they were."""
    found = []
    for name in sorted({*then["parts"], *now["parts"]}):
        old, new = then["parts"].get(name), now["parts"].get(name)
        if old is None or new is None:
            found.append(f"{name} ({'not ' if old is None else ''}given then)")
        else:
            found += [f"{name}/{text}" for text in _changed_files(old, new)]
    return found


def unchanged(part: PartPlan) -> bool:
    """Whether the folder's files still have the sizes and times that they had when it was planned."""
    try:
        return _stamps(part.folder, part.source["files"]) == (part.source["files"], part.stamps)
    except OSError:
        return False


def _changed_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences of two fingerprints; times of change count where both have them."""
    found = []
    for file in sorted({*old["files"], *new["files"]}):
        sizes = [side["files"].get(file) for side in (old, new)]
        if sizes[0] != sizes[1]:
            then, now = ("missing" if size is None else f"{size} bytes" for size in sizes)
            found.append(f"{file} ({then} then, {now} now)")
        elif "changed" in old and old["changed"].get(file) != new.get("changed", {}).get(file):
            found.append(f"{file} (written since)")
    if not found and old["digest"] != new["digest"]:
        found.append("headers or small files (of the same sizes)")
    return found


def _part(name: str, folder: Path, reader: KimiReader | DrafterReader) -> PartPlan:
    shards = reader.checkpoint.shards
    small = [file for file in (INDEX_NAME, *COPIED) if (folder / file).is_file()]
    sizes, stamps = _stamps(folder, (*shards, *small))
    sound = not reader.faults
    return PartPlan(
        name=name,
        folder=folder,
        reader=reader,
        faults=tuple(reader.faults),
        sizes={file: _size(reader, path, sound) for file, path, _, _ in part_files(reader.table)},
        source={"files": sizes, "digest": _digest(folder, shards, small)},
        stamps=stamps,
    )


def _size(reader: KimiReader | DrafterReader, path: str, sound: bool) -> int:
    """Bytes of one piece; of the usual type where the tensors cannot be trusted."""
    dtype = reader.stored(path) if sound else np.dtype(STORED[reader.table[path].dtype])
    return math.prod(layout(reader.table, path).shape) * dtype.itemsize


def _ordered(part: PartPlan) -> list[Block]:
    return in_file_order(part.reader.blocks())


def _stamps(folder: Path, names: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and times of change, by name."""
    stats = {name: (folder / name).stat() for name in sorted(names)}
    return {name: stat.st_size for name, stat in stats.items()}, {
        name: stat.st_mtime_ns for name, stat in stats.items()
    }


def _digest(folder: Path, shards: tuple[str, ...], small: list[str]) -> str:
    """SHA-256 of the small files and of the shards' headers."""
    digest = hashlib.sha256()
    for name in (*small, *shards):
        with open(folder / name, "rb") as file:
            if name in small:
                data = file.read()
            else:
                start = file.read(8)
                data = start + file.read(struct.unpack("<Q", start)[0])
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()
