"""How parameter arrays are cut into pieces, and what reads them: the ground on which loading and converting
stand.

A piece is what one layer holds of one parameter; a parameter without layers is one piece. `Layout` says how
many there are, their shape, and how they make up the array of `jddtree.models.parameters`. A `Reader` fills
any slice of any piece into memory that the caller gives: one reads Hugging Face tensors (kimi, dflash), one
reads a store.

Reading tensors, a `Block` is the unit of work: some rows of one piece, with the bytes of the files that they
come from.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from converters.checkpoint import DTYPES, Array, Checkpoint, Progress, Report, mismatch, phrase
from jddtree.models.parameters import Parameter

EXPERTS = "experts."
BLOCK_BYTES = 32 << 20  # of a block that may be cut anywhere: large reads, little memory
PREFETCH_BYTES = 1 << 20  # Linux reads no more than this at one request
STORED: Mapping[str, npt.DTypeLike] = {
    "compute": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int32": np.int32,
}

Index = tuple[slice, ...]
Table = Mapping[str, Parameter]


@dataclass(frozen=True)
class Layout:
    """The pieces of one parameter.

    stacked: pieces stand along an axis of their own in front; otherwise the first axis is that of all pieces
    together.
    """

    count: int
    shape: tuple[int, ...]
    stacked: bool


@dataclass(frozen=True)
class Source:
    """Bytes begin to end of one shard."""

    shard: int
    begin: int
    end: int


@dataclass(frozen=True)
class Block:
    """Rows start to stop (along the piece's first axis) of one piece of each of `paths`, and the bytes they
    need.
    """

    paths: tuple[str, ...]
    piece: int
    start: int
    stop: int
    sources: tuple[Source, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Where the block begins in the files; blocks in this order read every file from front to back."""
        return min((source.shard, source.begin) for source in self.sources)

    @property
    def source_bytes(self) -> int:
        """Bytes to read."""
        return sum(source.end - source.begin for source in self.sources)


class Reader(Protocol):
    """Slices of the pieces of all parameters in `table`, by dotted path. Reading from several threads is
    safe.
    """

    @property
    def table(self) -> Table:
        """The parameters."""

    def stored(self, path: str) -> np.dtype:
        """In what type the values are kept; nothing is lost in it."""

    def fill(self, path: str, piece: int, index: Index, out: Array) -> None:
        """Write the slice `index` (one slice of step 1 per axis of the piece) into `out`, cast to the type of
        `out`.

        INT4 words and scales need a C-contiguous int32 `out`.
        """

    def report(self, dtype: npt.DTypeLike) -> Report:
        """What reading everything, with "compute" as `dtype`, gives."""


class TensorReader(Reader, Protocol):
    """A reader of a Hugging Face folder whose tensors were checked."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The folder."""

    def blocks(self) -> list[Block]:
        """All work; every row of every piece in exactly one block, and every byte of a needed tensor too."""

    def wrong(self, block: Block) -> list[str]:
        """What only the values of small tensors show: phrases about those that contradict the others."""


def layout(table: Table, path: str) -> Layout:
    """How the array of a path is cut; `table` holds all parameters of the model."""
    shape = table[path].shape
    if path.startswith(EXPERTS):
        layers = table["moe.router"].shape[0]
        return Layout(layers, (shape[0] // layers, *shape[1:]), stacked=False)
    if "." in path:
        return Layout(shape[0], shape[1:], stacked=True)
    return Layout(1, shape, stacked=False)


def piece_of(array: Array, cut: Layout, piece: int) -> Array:
    """The view of one piece in the whole array."""
    rows = cut.shape[0]
    return array[piece] if cut.stacked else array[piece * rows : (piece + 1) * rows]


def whole(shape: Sequence[int]) -> Index:
    """The index of everything."""
    return tuple(slice(0, size) for size in shape)


def in_memory(parameter: Parameter, compute: npt.DTypeLike) -> np.dtype:
    """The type of a loaded array."""
    return np.dtype(compute if parameter.dtype == "compute" else parameter.dtype)


def memory_bytes(table: Table, compute: npt.DTypeLike) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(entry.shape) * in_memory(entry, compute).itemsize for entry in table.values())


def count_weights(table: Table) -> int:
    """Weights of the model; an INT4 one counts as one, scales as none."""
    return sum(
        0 if path.endswith("_scale") else math.prod(entry.shape) * (8 if path.startswith(EXPERTS) else 1)
        for path, entry in table.items()
    )


def row_blocks(
    checkpoint: Checkpoint, paths: tuple[str, ...], piece: int, tensor: str, rows: int
) -> Iterator[Block]:
    """Blocks of pieces whose `rows` rows come from the rows of one tensor, in order and equally many each."""
    size = checkpoint.entries[tensor].nbytes
    shard, first = checkpoint.position(tensor)
    step = max(1, BLOCK_BYTES * rows // max(1, size))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        begin, end = (first + size * row // rows for row in (start, stop))
        yield Block(paths, piece, start, stop, (Source(shard, begin, end),))


def map_rows(checkpoint: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> Array:
    """Rows of a tensor as a read-only view of a memory map that goes when the view does.

    So resident memory is only what is in use, unlike with `Checkpoint.read`, whose maps stay. All of it is
    asked for at once, which keeps the disk reading ahead in order.
    """
    entry = checkpoint.entries[name]
    rows = entry.shape[0]
    begin, end = (entry.begin + entry.nbytes * row // rows for row in (start, rows if stop is None else stop))
    dtype = np.dtype(DTYPES[entry.dtype])
    base = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with open(checkpoint.directory / entry.shard, "rb", buffering=0) as file:
        prefetch(file.fileno(), base, end)
        view = mmap.mmap(file.fileno(), end - base, access=mmap.ACCESS_READ, offset=base)
    return np.frombuffer(view, dtype, (end - begin) // dtype.itemsize, begin - base).reshape(
        -1, *entry.shape[1:]
    )


def prefetch(descriptor: int, begin: int, end: int) -> None:
    """Ask the kernel to read these bytes of an open file, without waiting; does nothing where there is no
    such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for start in range(begin, end, PREFETCH_BYTES):
        os.posix_fadvise(descriptor, start, min(PREFETCH_BYTES, end - start), os.POSIX_FADV_WILLNEED)


def read_all(
    reader: TensorReader, dtype: npt.DTypeLike, *, progress: Progress | None = None
) -> dict[str, npt.NDArray[np.generic]]:
    """Whole arrays in host memory, by path; memory stays near their size.

    dtype: of the "compute" arrays. progress: called with (bytes done, bytes in all) of the tensors.
    Raises UserError that lists every tensor whose value contradicts the others.
    """
    arrays = {path: np.empty(entry.shape, in_memory(entry, dtype)) for path, entry in reader.table.items()}
    cuts = {path: layout(reader.table, path) for path in arrays}

    def work(block: Block) -> list[str]:
        for path in block.paths:
            index = (slice(block.start, block.stop), *whole(cuts[path].shape[1:]))
            reader.fill(path, block.piece, index, piece_of(arrays[path], cuts[path], block.piece)[index[0]])
        return reader.wrong(block)

    blocks = in_file_order(reader.blocks())
    total, done, wrong = sum(block.source_bytes for block in blocks), 0, []
    with ThreadPoolExecutor(workers()) as pool:
        for block, found in zip(blocks, pool.map(work, blocks), strict=True):
            wrong += found
            done += block.source_bytes
            if progress is not None:
                progress(done, total)
    refuse(reader.checkpoint.directory, wrong)
    return arrays


def check_values(reader: TensorReader) -> None:
    """Raise UserError that lists every tensor whose value contradicts the others; `read_all` does that
    too.
    """
    with ThreadPoolExecutor(workers()) as pool:
        found = pool.map(reader.wrong, in_file_order(reader.blocks()))
        refuse(reader.checkpoint.directory, [text for texts in found for text in texts])


def in_file_order(blocks: Iterable[Block]) -> list[Block]:
    """Blocks in the order in which reading them is sequential."""
    return sorted(blocks, key=lambda block: block.position)


def refuse(directory: Path, wrong: list[str]) -> None:
    """Raise UserError when `wrong` (of `TensorReader.wrong`) holds anything."""
    if wrong:
        raise mismatch(directory, [phrase("whose value contradicts the packed weights", wrong)])


def workers() -> int:
    """Threads that read: some wait for the disk while others compute."""
    return min(16, (os.cpu_count() or 1) + 2)


def source_of(checkpoint: Checkpoint, tensor: str) -> Source:
    """All bytes of one tensor."""
    shard, begin = checkpoint.position(tensor)
    return Source(shard, begin, begin + checkpoint.entries[tensor].nbytes)
