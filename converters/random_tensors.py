"""Random tensors of a checkpoint by name and shape, and safetensors shards written without holding one in
memory.

Values have the sizes that trained ones have: weights of variance 1 / fan-in, norms near one, INT4 words of
all sixteen values with scales that give the same variance. A tensor's bytes depend on the seed, its name,
type and shape alone.
"""

import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.checkpoint import DTYPES, INDEX_NAME, Progress
from converters.pieces import workers
from jddtree.config import GROUP_SIZE

CHUNK = 1 << 23  # values drawn at once
INT4_DEVIATION = math.sqrt((16**2 - 1) / 12)  # of the sixteen values
SMALL = 0.01  # of biases
QUANTILES = 1 << 16


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. dtype: the safetensors name. given: its values, where they are not random."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    given: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def write_shards(
    directory: Path, tensors: Sequence[Tensor], seed: int, shards: int, progress: Progress | None = None
) -> None:
    """Write tensors, in their order, to `shards` files of about equal size, with the index.

    One shard is called model.safetensors and has no index, as the published drafters. progress: called with
    (bytes done, bytes in all).
    """
    groups = _split(tensors, shards)
    names = [f"model-{number:05}-of-{len(groups):06}.safetensors" for number in range(1, len(groups) + 1)]
    if shards == 1:
        names = ["model.safetensors"]
    total, done, drawn = sum(tensor.nbytes for tensor in tensors), 0, Values(seed)
    with ThreadPoolExecutor(workers()) as pool:
        for name, group in zip(names, groups, strict=True):
            with open(directory / name, "wb") as file:
                file.write(header(group))
                for data in _ahead(pool, group, drawn):
                    file.write(data.view(np.uint8).data)
                    done += data.nbytes
                    if progress is not None:
                        progress(done, total)
    if shards > 1:
        places = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def header(tensors: Sequence[Tensor]) -> bytes:
    """The beginning of a safetensors file with these tensors one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


class Values:
    """Draws values; `seed` chooses them.

    Sixteen random bits choose one of 65536 quantiles, five times as fast as drawing normal numbers and as
    good here.
    """

    def __init__(self, seed: int):
        places = (np.arange(QUANTILES) + 0.5) / QUANTILES
        self.seed, self.uniform = seed, places.astype(np.float32)
        self.normal = np.array([NormalDist().inv_cdf(place) for place in places], np.float32)

    def draw(self, tensor: Tensor, chunk: int, count: int) -> npt.NDArray[Any]:
        """Values chunk * CHUNK and the following ones, flat, in the tensor's type."""
        dtype = np.dtype(DTYPES[tensor.dtype])
        if tensor.given:
            return np.array(tensor.given, dtype)
        random = np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(tensor.name.encode()), chunk]))
        if tensor.name.endswith("weight_packed"):
            return random.integers(0, 1 << 64, -(-count // 2), np.uint64).view(dtype)[:count]
        places = random.integers(0, 1 << 64, -(-count // 4), np.uint64).view(np.uint16)[:count]
        table, out = self._quantiles(tensor).astype(dtype), np.empty(count, dtype)
        for first in range(0, count, QUANTILES):
            part = slice(first, first + QUANTILES)
            np.take(table, places[part], out=out[part], mode="clip")
        return out

    def _quantiles(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        if tensor.name.endswith("weight_scale"):
            middle = 1 / (INT4_DEVIATION * math.sqrt(tensor.shape[1] * GROUP_SIZE))
            return (self.uniform + np.float32(0.5)) * np.float32(middle)
        mean, deviation = moments(tensor.name, tensor.shape)
        return self.normal * np.float32(deviation) + np.float32(mean)


def moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    if name.endswith("bias"):
        return 0.0, SMALL
    if len(shape) == 1:
        return 1.0, 0.1  # norms
    if "embed_tokens" in name:
        return 0.0, 1.0
    return 0.0, 1 / math.sqrt(math.prod(shape[1:]))


def _ahead(pool: ThreadPoolExecutor, tensors: Sequence[Tensor], values: Values) -> Iterator[npt.NDArray[Any]]:
    """All values in order; a few chunks are drawn before they are asked for."""
    waiting: deque[Future[npt.NDArray[Any]]] = deque()
    for tensor in tensors:
        for chunk, first in enumerate(range(0, math.prod(tensor.shape), CHUNK)):
            count = min(CHUNK, math.prod(tensor.shape) - first)
            waiting.append(pool.submit(values.draw, tensor, chunk, count))
            if len(waiting) > 2 * workers():
                yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _split(tensors: Sequence[Tensor], shards: int) -> list[list[Tensor]]:
    """Consecutive groups of about equal bytes, none of them empty."""
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    for tensor in tensors:
        groups[min(shards - 1, done * shards // max(1, total))].append(tensor)
        done += tensor.nbytes
    return [group for group in groups if group]
