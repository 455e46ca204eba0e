"""A Hugging Face checkpoint folder: which tensor lies where, and its bytes without a copy.

The folder holds `model.safetensors.index.json` with its shards, or one `model.safetensors`, or several shards without
an index (those named model*, if there are such). Headers are read when the folder is opened and every shard's size is
checked then; data is memory-mapped at the first read. Format: https://github.com/huggingface/safetensors (header length
in 8 bytes, JSON header, data).

Also here: what every converter reports, and the one error that lists all differences to what a model needs.
"""

import json
import math
import mmap
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jddtree.config import read_json
from jddtree.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
OPEN_SHARDS = 4  # maps kept, so that tensors that straddle shards do not open a file again and again
LISTED = 8  # names that an error shows of each kind
DTYPES: Mapping[str, npt.DTypeLike] = {
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
Specification = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """One tensor. dtype: the safetensors name ("BF16"). begin, end: bytes from the start of the shard's file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Index:
    """The index file. weight_map: tensor name to shard. total_size: bytes of all tensors, None where not given."""

    weight_map: Mapping[str, str]
    total_size: int | None


@dataclass(frozen=True)
class Report:
    """What a load did.

    tensors, file_bytes: read from `files`. parameters: weights; an INT4 one counts as one, scales as none.
    memory_bytes: of the result. skipped_*: tensors of parts that are not used (vision). notes: harmless oddities.
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

    Raises UserError when the folder, a shard or a tensor that the index names is missing, when a shard is shorter than
    its header says, and when a header is not one. A wrong total_size in the index is only noted.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{self.directory} is not a folder; give the folder of a Hugging Face checkpoint")
        self.index = read_index(self.directory)
        self.shards = _shard_names(self.directory, self.index)
        self.entries: dict[str, Entry] = {}
        for shard in self.shards:
            self._add(shard, read_header(self.directory / shard))
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
        """Where the tensor begins: number of its shard, byte in it. Reading in this order reads every file once."""
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
                    f"{self.directory / shard} holds {_listed(unnamed)}, which {INDEX_NAME} does not place there; "
                    "download the index and the shard again"
                )
        elif twice := [name for name in found if name in self.entries]:
            raise UserError(
                f"{self.directory / shard} holds {_listed(twice)}, which {self.entries[twice[0]].shard} holds too; "
                "keep the shards of one checkpoint in the folder"
            )
        self.entries |= found

    def _check_index(self) -> tuple[str, ...]:
        if self.index is None:
            return ()
        lost = [name for name in self.index.weight_map if name not in self.entries]
        if lost:
            raise UserError(
                f"{self.directory / self.index.weight_map[lost[0]]} does not hold {_listed(lost)}, which {INDEX_NAME} "
                "places there; download the index and the shard again"
            )
        found = sum(entry.nbytes for entry in self.entries.values())
        if self.index.total_size in (None, found):
            return ()
        return (f"{INDEX_NAME}: total_size is {self.index.total_size} bytes, but the tensors have {found} bytes",)


def read_index(directory: Path) -> Index | None:
    """The index file of a folder, None where there is none. Raises UserError when it is not an index."""
    path = Path(directory) / INDEX_NAME
    if not path.exists():
        return None
    values = read_json(path)
    weights, metadata = values.get("weight_map"), values.get("metadata")
    if not isinstance(weights, dict) or not weights or not all(type(shard) is str for shard in weights.values()):
        raise UserError(f"{path}: field 'weight_map' does not map tensor names to shards; download the index again")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weights, int(size) if isinstance(size, int | float) else None)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors that one safetensors file declares, in file order.

    Raises UserError, naming the file, when it is no safetensors file or shorter than its header says.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start.startswith(b"version "):
            raise UserError(
                f"{path} is a Git LFS pointer of {size} bytes, not the shard; run 'git lfs pull' in the folder"
            )
        if not 2 <= length <= size - 8:
            raise UserError(f"{path} has {size} bytes, but its header says {length + 8}; download the shard again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {
            name: _entry(path.name, 8 + length, value) for name, value in header.items() if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} has a corrupt header of {length} bytes ({error}); download the shard again") from None
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end > size:
        raise UserError(f"{path} has {size} bytes, but its header needs {end}; download the shard again")
    return entries


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


def _entry(shard: str, data: int, value: Mapping[str, Any]) -> Entry:
    """value: {"dtype", "shape", "data_offsets"} of a header; data: byte where the offsets begin."""
    begin, end = (int(offset) for offset in value["data_offsets"])
    dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
    if begin < 0 or end < begin or any(size < 0 for size in shape):
        raise ValueError(f"negative size: offsets {begin} to {end}, shape {list(shape)}")
    if dtype in DTYPES and (wanted := math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize) != end - begin:
        raise ValueError(f"{dtype} {list(shape)} needs {wanted} bytes, but has {end - begin}")
    return Entry(shard, dtype, shape, data + begin, data + end)


def _shard_names(directory: Path, index: Index | None) -> tuple[str, ...]:
    """Names of the files to read, sorted; all of them exist."""
    if index is not None:
        names = sorted(set(index.weight_map.values()))
        lost = [name for name in names if not (directory / name).is_file()]
        if lost:
            raise UserError(
                f"{directory} lacks {len(lost)} of the {len(names)} shards that {INDEX_NAME} names: {_listed(lost)}; "
                "download them"
            )
        return tuple(names)
    if (directory / SINGLE_NAME).is_file():
        return (SINGLE_NAME,)
    names = sorted(path.name for path in directory.glob("model*.safetensors"))
    names = names or sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise UserError(f"{directory} has no .safetensors file; give the folder of a Hugging Face checkpoint")
    totals = {int(match[1]) for name in names if (match := re.search(r"-of-(\d+)\.safetensors$", name))}
    if totals and totals != {len(names)}:
        raise UserError(f"{directory} has {len(names)} shards of {max(totals)}; download the others, or {INDEX_NAME}")
    return tuple(names)
