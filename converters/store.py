"""A store: the parameters of a target and its drafter as plain files, in the global layout that every mesh slices.

    STORE/manifest.json           written last; a folder without it is no store
    STORE/target/embed.bin        a parameter without layers
    STORE/target/moe.q_b/000.bin  one layer of a parameter; experts.*: all experts of the layer
    STORE/target/config.json      and the other small files, copied
    STORE/drafter/...             only when a drafter was converted

A .bin file holds the piece of `converters.pieces.layout`, little-endian and C-ordered, nothing else: bfloat16 (float32
where the checkpoint has it), float32 for the router's bias, int32 for experts in the order of `converters.packing`.
Nothing depends on the number of devices, on time or on the machine. docs/store.md says why it is made so.
"""

import math
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from converters.checkpoint import Array, Progress, Report
from converters.crc import crc32
from converters.drafters import format_of, read_config
from converters.manifest import DTYPES, JOURNAL, MANIFEST, Part, file_name, read_manifest
from converters.pieces import Index, Table, count_weights, layout, memory_bytes, prefetch, workers
from jddtree.config import target_config
from jddtree.errors import UserError
from jddtree.models.parameters import target_parameters

READ_BYTES = 8 << 20
LISTED = 4  # file names in one error


class Store:
    """A complete store whose files all have their size.

    Raises UserError for another folder, an unfinished conversion, another format version, a manifest that cannot be
    read, and files that are missing or have another size. Contents are only read by `check`.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).is_file():
            raise _no_store(self.directory)
        self.parts = read_manifest(self.directory)
        self._check_sizes()

    def folder(self, part: str) -> Path:
        """The folder of "target" or "drafter", with config.json and, for the target, tokenizer and chat template."""
        return self.directory / part

    def reader(self, part: str) -> "StoreReader":
        """The parameters of "target" or "drafter". Raises UserError where config.json needs others than are stored."""
        folder = self.folder(part)
        if part not in self.parts:
            have = " and a ".join(self.parts)
            raise UserError(f"{self.directory} holds only a {have}; convert again with a {part}")
        table: Table
        if part == "target":
            table = target_parameters(target_config(folder))
        else:
            table = format_of(config := read_config(folder)).parameters(config)
        found = {path: shape for path, (shape, _) in self.parts[part].parameters.items()}
        if found != {path: entry.shape for path, entry in table.items()}:
            raise UserError(f"{folder / 'config.json'} describes another model than {MANIFEST}; convert again")
        return StoreReader(folder, table, self.parts[part])

    def check(self, progress: Progress | None = None) -> None:
        """Read every file and compare its checksum. Raises UserError naming each file that is damaged.

        progress: called with (bytes done, bytes in all).
        """
        files = [(f"{part}/{name}", file) for part, entry in self.parts.items() for name, file in entry.files.items()]
        total, done, damaged = sum(file.nbytes for _, file in files), 0, []
        with ThreadPoolExecutor(workers()) as pool:
            sums = pool.map(lambda item: sum_of_file(self.directory / item[0]), files)
            for (name, file), value in zip(files, sums, strict=True):
                if value != file.crc32:
                    damaged.append(f"{name} (CRC-32 {value:08x}, wanted {file.crc32:08x})")
                done += file.nbytes
                if progress is not None:
                    progress(done, total)
        if damaged:
            raise _damaged(self.directory, damaged)

    def _check_sizes(self) -> None:
        damaged = []
        for part, entry in self.parts.items():
            for name, file in entry.files.items():
                path = self.folder(part) / name
                size = path.stat().st_size if path.is_file() else None
                if size is None:
                    damaged.append(f"{part}/{name} (missing)")
                elif size != file.nbytes:
                    damaged.append(f"{part}/{name} ({size} bytes, wanted {file.nbytes})")
        if damaged:
            raise _damaged(self.directory, damaged)


class StoreReader:
    """Slices of one part's arrays; a `converters.pieces.Reader`. Maps go as soon as a slice is copied."""

    def __init__(self, folder: Path, table: Table, part: Part):
        self.folder, self.table, self.part = folder, table, part

    def stored(self, path: str) -> np.dtype:
        """See `Reader`."""
        return np.dtype(DTYPES[self.part.parameters[path][1]])

    def fill(self, path: str, piece: int, index: Index, out: Array) -> None:
        """See `Reader`."""
        cut = layout(self.table, path)
        out[...] = map_piece(self.folder / file_name(path, cut, piece), self.stored(path), cut.shape, index)[index]

    def report(self, dtype: npt.DTypeLike) -> Report:
        """See `Reader`; tensors are the store's files."""
        names = tuple(name for name in self.part.files if name.endswith(".bin"))
        size = sum(self.part.files[name].nbytes for name in names)
        return Report(names, len(names), count_weights(self.table), size, memory_bytes(self.table, dtype))


def is_store(directory: Path) -> bool:
    """Whether a folder is a store, or the beginning of one (which `Store` refuses, saying how to go on)."""
    return any((Path(directory) / name).is_file() for name in (MANIFEST, JOURNAL))


def map_piece(path: Path, dtype: np.dtype, shape: tuple[int, ...], index: Index) -> Array:
    """A whole piece as a read-only map, of which `index` will be read next."""
    if sys.byteorder != "little":
        raise UserError("stores are little-endian, but this machine is not; use another one")
    with open(path, "rb", buffering=0) as file:
        row = math.prod(shape[1:]) * dtype.itemsize
        prefetch(file.fileno(), index[0].start * row, index[0].stop * row)
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(view, dtype, math.prod(shape)).reshape(shape)


def sum_of_file(path: Path) -> int:
    """CRC-32 of a file, read from front to back in little memory."""
    value, buffer = 0, memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = crc32(buffer[:count], value)
    return value


def _no_store(directory: Path) -> UserError:
    if (directory / JOURNAL).is_file():
        return UserError(f"{directory} is an unfinished conversion; run the same convert command again, it resumes")
    return UserError(f"{directory} is no store: it has no {MANIFEST}; give a folder that convert wrote")


def _damaged(directory: Path, names: list[str]) -> UserError:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return UserError(
        f"the store {directory} has {len(names)} damaged file{'' if len(names) == 1 else 's'}: "
        f"{', '.join(names[:LISTED])}{more}; copy it again, or convert again with --force"
    )
