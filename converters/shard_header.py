"""The header of a safetensors file: which tensors it holds, and where their bytes are.

Source of the format: https://github.com/huggingface/safetensors (header length in 8 bytes, JSON header,
data). Headers are untrusted: each is checked here, with messages that name both values, and then by the
library of that name, which has the last word: it refuses tensors that overlap, holes between them and bytes
after the last one.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from jddtree import strict_json
from jddtree.errors import UserError

HEADER_BYTES = 100_000_000  # the most that the safetensors library reads
AXES = 32  # of one tensor; numpy has no more than 64
SHOWN = 300  # characters of what is wrong with a header
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


@dataclass(frozen=True)
class Entry:
    """One tensor. dtype: the safetensors name ("BF16"). begin, end: bytes from the start of the shard's
    file.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.end - self.begin


def read_header(path: Path, shard: str | None = None) -> dict[str, Entry]:
    """The tensors that one safetensors file declares, in file order.

    shard: what the entries call the file; None is its name. Raises UserError, naming the file, when it cannot
    be read, is no safetensors file, is shorter than its header says, or is one that the safetensors library
    refuses: tensors that overlap, holes, bytes after the last one.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            raw = file.read(_header_length(path, size, file.read(8)))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from None
    try:
        header = strict_json.parse(raw)
        begin = 8 + len(raw)
        entries = {
            name: _entry(shard or path.name, begin, value)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(path, len(raw), error) from None
    end = max((entry.end for entry in entries.values()), default=begin)
    if end > size:
        raise UserError(f"{path} has {size} bytes, but its header needs {end}; download the shard again")
    _check_by_library(path, len(raw))
    return entries


def _header_length(path: Path, size: int, start: bytes) -> int:
    """Bytes of the JSON header of a file of `size` bytes that begins with `start`."""
    if start.startswith(b"version "):
        raise UserError(
            f"{path} is a Git LFS pointer of {size} bytes, not the shard; run 'git lfs pull' in the folder"
        )
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= size - 8:
        raise UserError(
            f"{path} has {size} bytes, but its header says {length + 8}; download the shard again"
        )
    if length > HEADER_BYTES:
        raise UserError(
            f"{path} has a header of {length} bytes, but at most {HEADER_BYTES} are read; download the "
            "shard again"
        )
    return int(length)


def _check_by_library(path: Path, length: int) -> None:
    """Have the safetensors library check a header; it maps the file and reads no tensor."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise _corrupt(path, length, error) from None


def _corrupt(path: Path, length: int, error: Exception) -> UserError:
    text = str(error)[:SHOWN]
    return UserError(f"{path} has a corrupt header of {length} bytes ({text}); download the shard again")


def _entry(shard: str, data: int, value: Mapping[str, Any]) -> Entry:
    """value: {"dtype", "shape", "data_offsets"} of a header; data: byte where the offsets begin."""
    begin, end = _sizes("data_offsets", value["data_offsets"])
    dtype, shape = str(value["dtype"]), _sizes("shape", value["shape"])
    if end < begin:
        raise ValueError(f"negative size: offsets {begin} to {end}, shape {list(shape)}")
    if dtype in DTYPES and (wanted := math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize) != end - begin:
        raise ValueError(f"{dtype} {list(shape)} needs {wanted} bytes, but has {end - begin}")
    return Entry(shard, dtype, shape, data + begin, data + end)


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name} is {values!r}, wanted integers")
    if len(values) > AXES or any(value.bit_length() > 63 for value in values):
        raise ValueError(f"{name} is too large: {values!r}")
    if any(value < 0 for value in values):
        raise ValueError(f"negative size: {name} is {values!r}")
    return tuple(values)
