"""A Hugging Face checkpoint folder: which tensor lies where, and its bytes without a copy.

The folder holds `model.safetensors.index.json` with its shards, or one `model.safetensors`, or several shards
without an index (those named model*, if there are such). The index may name shards in folders of the folder,
but none outside (`converters.file_names`). Headers are read when the folder is opened and every shard's size
is checked then; data is memory-mapped at the first read. Format: https://github.com/huggingface/safetensors
(header length in 8 bytes, JSON header, data); the library of that name has the last word on a header.

Also here: what every converter reports, and the one error that lists all differences to what a model needs.
"""

import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.file_names import inside
from converters.shard_header import DTYPES, Entry, read_header
from jddtree.config.fields import read_json
from jddtree.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
OPEN_SHARDS = 4  # maps kept, so that tensors that straddle shards do not open a file again and again
LISTED = 8  # names that an error shows of each kind

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
Specification = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Index:
    """The index file. weight_map: tensor name to shard. total_size: bytes of all tensors, None where not
    given.
    """

    weight_map: Mapping[str, str]
    total_size: int | None


@dataclass(frozen=True)
class Report:
    """What a load did.

    tensors, file_bytes: read from `files`. parameters: weights; an INT4 one counts as one, scales as none.
    memory_bytes: of the result. skipped_*: tensors of parts that are not used (vision). notes: harmless
    oddities.
    """

    files: tuple[str, ...]
    tensors: int
    parameters: int
    file_bytes: int
    memory_bytes: int
    skipped_tensors: int = 0
    skipped_bytes: int = 0
    notes: tuple[str, ...] = ()


class Checkpoint:
    """Tensors of one folder by name.

    Raises UserError when the folder, a shard or a tensor that the index names is missing, when a shard is
    shorter than its header says, and when a header is not one. A wrong total_size in the index is only noted.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        if not os.path.isdir(self.directory):
            raise UserError(f"{self.directory} is not a folder; give the folder of a Hugging Face checkpoint")
        self.index = read_index(self.directory)
        self.shards = _shard_names(self.directory, self.index)
        self.entries: dict[str, Entry] = {}
        for shard in self.shards:
            self._add(shard, read_header(self.directory / shard, shard))
        self.notes = self._check_index()
        self._numbers = {shard: number for number, shard in enumerate(self.shards)}
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def read(self, name: str) -> Array:
        """A read-only view of one tensor's bytes in the memory map; no copy."""
        entry = self.entries[name]
        count = entry.nbytes // np.dtype(DTYPES[entry.dtype]).itemsize
        if not count:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        flat = np.frombuffer(self._map(entry.shard), DTYPES[entry.dtype], count, entry.begin)
        return flat.reshape(entry.shape)

    def position(self, name: str) -> tuple[int, int]:
        """Where the tensor begins: number of its shard, byte in it. Reading in this order reads every file
        once.
        """
        entry = self.entries[name]
        return self._numbers[entry.shard], entry.begin

    def _map(self, shard: str) -> mmap.mmap:
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        with open(self.directory / shard, "rb") as file:
            self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps) > OPEN_SHARDS:
            self._maps.popitem(last=False)  # arrays that still use it keep it alive
        return self._maps[shard]

    def _add(self, shard: str, found: Mapping[str, Entry]) -> None:
        if self.index is not None:
            unnamed = [name for name in found if self.index.weight_map.get(name) != shard]
            if unnamed:
                raise UserError(
                    f"{self.directory / shard} holds {_listed(unnamed)}, which {INDEX_NAME} does not "
                    "place there; download the index and the shard again"
                )
        elif twice := [name for name in found if name in self.entries]:
            raise UserError(
                f"{self.directory / shard} holds {_listed(twice)}, which {self.entries[twice[0]].shard} "
                "holds too; keep the shards of one checkpoint in the folder"
            )
        self.entries |= found

    def _check_index(self) -> tuple[str, ...]:
        if self.index is None:
            return ()
        lost = [name for name in self.index.weight_map if name not in self.entries]
        if lost:
            raise UserError(
                f"{self.directory / self.index.weight_map[lost[0]]} does not hold {_listed(lost)}, which "
                f"{INDEX_NAME} places there; download the index and the shard again"
            )
        found = sum(entry.nbytes for entry in self.entries.values())
        if self.index.total_size in (None, found):
            return ()
        return (
            f"{INDEX_NAME}: total_size is {self.index.total_size} bytes, but the tensors have {found} bytes",
        )


def read_index(directory: Path) -> Index | None:
    """The index file of a folder, None where there is none.

    Raises UserError when it is not an index, or names a shard that would lie outside the folder.
    """
    path = Path(directory) / INDEX_NAME
    if not os.path.lexists(path):
        return None
    values = read_json(path)
    weights, metadata = values.get("weight_map"), values.get("metadata")
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(type(shard) is str for shard in weights.values())
    ):
        raise UserError(
            f"{path}: field 'weight_map' does not map tensor names to shards; download the index again"
        )
    for shard in sorted(set(weights.values())):
        if not inside(shard):
            raise UserError(
                f"{path}: field 'weight_map' names the shard {shard[:80]!r}, which is no file inside the "
                "folder; download the index again"
            )
    size: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weights, int(size) if type(size) in (int, float) else None)


def differences(
    found: Mapping[str, Entry], expected: Specification, also: Mapping[str, str] | None = None
) -> list[str]:
    """One phrase for each kind of difference, empty when there is none.

    also: a second dtype that is good too, by the last part of a tensor's name ({"weight_shape": "I64"}).
    """
    also = also or {}
    common = [name for name in expected if name in found]
    shapes, types = [], []
    for name in common:
        (dtype, shape), entry = expected[name], found[name]
        if entry.shape != shape:
            shapes.append(f"{name} is {list(entry.shape)}, wanted {list(shape)}")
        if entry.dtype not in (dtype, also.get(name.rsplit(".", 1)[-1])):
            types.append(f"{name} is {entry.dtype}, wanted {dtype}")
    kinds = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of the wrong shape": shapes,
        "of the wrong type": types,
    }
    return [phrase(kind, names) for kind, names in kinds.items() if names]


def phrase(kind: str, names: list[str]) -> str:
    """'2 tensors missing: a, b'; long lists are cut, the count is exact."""
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} {kind}: {_listed(names)}"


def mismatch(directory: Path, phrases: list[str]) -> UserError:
    """The one error that lists all differences."""
    return UserError(
        f"the tensors in {directory} are not those that its config.json needs: {'; '.join(phrases)}; "
        "give a folder whose config.json and shards belong together"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _shard_names(directory: Path, index: Index | None) -> tuple[str, ...]:
    """Names of the files to read, sorted; all of them exist."""
    if index is not None:
        names = sorted(set(index.weight_map.values()))
        lost = [name for name in names if not os.path.isfile(directory / name)]
        if lost:
            raise UserError(
                f"{directory} lacks {len(lost)} of the {len(names)} shards that {INDEX_NAME} names: "
                f"{_listed(lost)}; download them"
            )
        return tuple(names)
    if os.path.isfile(directory / SINGLE_NAME):
        return (SINGLE_NAME,)
    names = sorted(path.name for path in directory.glob("model*.safetensors"))
    names = names or sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise UserError(f"{directory} has no .safetensors file; give the folder of a Hugging Face checkpoint")
    totals = {int(match[1]) for name in names if (match := re.search(r"-of-(\d+)\.safetensors$", name))}
    if totals and totals != {len(names)}:
        raise UserError(
            f"{directory} has {len(names)} shards of {max(totals)}; download the others, or {INDEX_NAME}"
        )
    return tuple(names)
