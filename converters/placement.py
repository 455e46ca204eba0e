"""From a `Reader` (a store, or Hugging Face folders) onto devices: every device gets only its slice.

The only module here that uses JAX. Each process reads what its own devices hold, once for devices that hold
the same. A slice up to HOST_BYTES is read whole and moved; a larger one is made on the device and filled in
place, in chunks of at most CHUNK_BYTES, so host memory stays at a few chunks however large the model is.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from converters.checkpoint import Progress
from converters.pieces import Index, Layout, Reader, Table, in_memory, layout, workers
from jddtree.errors import UserError
from jddtree.models.parameters import Parameter

HOST_BYTES = 256 << 20
CHUNK_BYTES = 128 << 20
SLICES = 8  # at a time: each holds HOST_BYTES, or chunks
AHEAD = 2  # chunks of a slice that are read before the one before them is on the device
GIB = 1 << 30

ShardingOf = Callable[[str, Parameter], jax.sharding.Sharding]


@dataclass(frozen=True)
class Chunk:
    """A part of a local array, `place`, and where it comes from: the slice `index` of one piece."""

    piece: int
    index: Index
    place: Index

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part, with the axis of the pieces where they are stacked."""
        return tuple(side.stop - side.start for side in self.place)


@dataclass(frozen=True)
class _Slice:
    """One slice of one array, and the devices that hold it."""

    path: str
    bounds: Index
    devices: tuple[jax.Device, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(bound.stop - bound.start for bound in self.bounds)


def load_arrays(
    reader: Reader,
    dtype: npt.DTypeLike,
    sharding_of: ShardingOf | None = None,
    *,
    placed: Table | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """The arrays of `reader.table`, by dotted path, on this process's devices.

    dtype: of the "compute" arrays. sharding_of: sharding of each array, by path and parameter; None puts all
    on the first device. placed: the table as the devices hold it (`jddtree.models.partition.on_mesh`), where
    it differs from `reader.table`: axes may be longer, which is filled with zeros, and `experts.*` may be
    [layers, experts, ...]. progress: called with (bytes done, bytes in all) of this process's slices, from
    one thread at a time. Raises UserError for an axis that the sharding does not divide.
    """
    placed = placed or reader.table
    shardings = {path: _sharding(sharding_of, path, entry) for path, entry in placed.items()}
    work = [part for path, sharding in shardings.items() for part in _slices(placed, path, sharding)]
    # Long ones first: none is left to the end alone.
    work.sort(key=lambda part: -_nbytes(placed, part, dtype))
    meter = _Meter(progress, sum(_nbytes(placed, part, dtype) for part in work))
    held: dict[str, list[jax.Array]] = {path: [] for path in shardings}
    with ThreadPoolExecutor(SLICES) as pool, ThreadPoolExecutor(workers()) as readers:
        load = lambda part: _Loader(reader, part, dtype, readers, meter).load()
        for part, arrays in zip(work, pool.map(load, work), strict=True):
            held[part.path] += arrays
    return {
        path: jax.make_array_from_single_device_arrays(placed[path].shape, sharding, held[path])
        for path, sharding in shardings.items()
    }


def device_bytes(
    table: Table, dtype: npt.DTypeLike, sharding_of: ShardingOf | None = None
) -> dict[jax.Device, int]:
    """Bytes of all arrays of a table (as the devices hold it) on each of this process's devices."""
    needed: dict[jax.Device, int] = {}
    for path, entry in table.items():
        sharding = _sharding(sharding_of, path, entry)
        size = math.prod(sharding.shard_shape(entry.shape)) * in_memory(entry, dtype).itemsize
        for device in sharding.addressable_devices:
            needed[device] = needed.get(device, 0) + size
    return needed


def require_memory(
    needed: Iterable[Mapping[jax.Device, int]],
    *,
    reserve: int = 0,
    stats_of: Callable[[jax.Device], Mapping[str, int] | None] = lambda device: device.memory_stats(),
) -> None:
    """Raise UserError when some device has too little free memory; devices that do not tell are taken to have
    enough.

    needed: of `device_bytes`, one of each part to load. reserve: bytes to leave for cache and computation.
    """
    total: dict[jax.Device, int] = {}
    for part in needed:
        for device, size in part.items():
            total[device] = total.get(device, 0) + size
    for device, size in total.items():
        stats = stats_of(device) or {}
        if "bytes_limit" not in stats:
            continue
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if size + reserve > free:
            more = f" and {reserve / GIB:.1f} GiB to work with" if reserve else ""
            raise UserError(
                f"{device} has {free / GIB:.1f} GiB of free memory, but its share of the weights needs "
                f"{size / GIB:.1f} GiB{more}; use more devices"
            )


def chunks(cut: Layout, bounds: Index, chunk_bytes: int, itemsize: int) -> Iterator[Chunk]:
    """Cut the slice `bounds` of a whole array into chunks of one piece, of at most `chunk_bytes` or one
    row.
    """
    axis = 1 if cut.stacked else 0
    rest = tuple(slice(0, bound.stop - bound.start) for bound in bounds[axis + 1 :])
    row = math.prod(side.stop for side in rest) * itemsize
    if not row:
        return
    for piece, first, last, offset in _segments(cut, bounds):
        step = _even_step(last - first, max(1, chunk_bytes // row))
        for start in range(first, last, step):
            stop = min(last, start + step)
            place: Index = (slice(start - first + offset, stop - first + offset), *rest)
            if cut.stacked:
                place = (slice(piece - bounds[0].start, piece - bounds[0].start + 1), *place)
            yield Chunk(piece, (slice(start, stop), *bounds[axis + 1 :]), place)


def _segments(cut: Layout, bounds: Index) -> Iterator[tuple[int, int, int, int]]:
    """(piece, first row and end in it, where the first row goes) of every piece that `bounds` meets."""
    first, last = bounds[0].start, bounds[0].stop
    if cut.stacked:
        yield from ((piece, bounds[1].start, bounds[1].stop, 0) for piece in range(first, last))
        return
    rows = cut.shape[0]
    for piece in range(first // rows, -(-last // rows)):
        begin = max(first, piece * rows)
        yield piece, begin - piece * rows, min(last, (piece + 1) * rows) - piece * rows, begin - first


def _even_step(rows: int, most: int) -> int:
    """At most `most`; a divisor of `rows` where one is near, as chunks of every other shape are compiled once
    more.
    """
    return next((step for step in range(min(rows, most), most // 2, -1) if rows % step == 0), most)


def _sharding(sharding_of: ShardingOf | None, path: str, parameter: Parameter) -> jax.sharding.Sharding:
    if sharding_of is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return sharding_of(path, parameter)


def _slices(table: Table, path: str, sharding: jax.sharding.Sharding) -> list[_Slice]:
    """The different slices that this process's devices hold."""
    shape = table[path].shape
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise UserError(
            f"{path} {list(shape)} cannot be split like this ({error}); use another mesh"
        ) from None
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    return [
        _Slice(path, tuple(slice(*bound) for bound in bounds), tuple(devices))
        for bounds, devices in holders.items()
    ]


def _nbytes(table: Table, part: _Slice, dtype: npt.DTypeLike) -> int:
    return math.prod(part.shape) * in_memory(table[part.path], dtype).itemsize


class _Meter:
    """Adds up bytes from many threads."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done, self.lock = progress, total, 0, Lock()

    def add(self, size: int) -> None:
        with self.lock:
            self.done += size
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Loader:
    """Loads one slice; chunks are read by `readers`, AHEAD of them before they are wanted."""

    def __init__(
        self, reader: Reader, part: _Slice, dtype: npt.DTypeLike, readers: ThreadPoolExecutor, meter: _Meter
    ):
        self.reader, self.part, self.readers, self.meter = reader, part, readers, meter
        parameter, cut = reader.table[part.path], layout(reader.table, part.path)
        self.kind = in_memory(parameter, dtype)
        self.stacked = cut.stacked or len(part.bounds) > len(parameter.shape)
        self.size = math.prod(part.shape) * self.kind.itemsize
        shape = (cut.count, *cut.shape) if self.stacked else parameter.shape
        real = tuple(
            slice(min(b.start, size), min(b.stop, size)) for b, size in zip(part.bounds, shape, strict=True)
        )
        self.chunks = list(chunks(replace(cut, stacked=self.stacked), real, CHUNK_BYTES, self.kind.itemsize))

    def load(self) -> list[jax.Array]:
        """The slice on each of its devices."""
        arrays = self._through_host() if self.size <= HOST_BYTES else self._in_place()
        self.meter.add(self.size - sum(math.prod(chunk.shape) for chunk in self.chunks) * self.kind.itemsize)
        return arrays

    def _through_host(self) -> list[jax.Array]:
        host = np.zeros(self.part.shape, self.kind)
        for chunk in self.chunks:
            part = host[chunk.place]
            if part.flags.c_contiguous:
                self._fill(chunk, part)
            else:
                part[...] = self._read(chunk)
            self.meter.add(part.nbytes)
        return [jax.block_until_ready(jax.device_put(host, device)) for device in self.part.devices]

    def _in_place(self) -> list[jax.Array]:
        arrays = [jnp.zeros(self.part.shape, self.kind, device=device) for device in self.part.devices]
        for chunk, host in self._ahead():
            starts = np.array([side.start for side in chunk.place], np.int32)
            for number, device in enumerate(self.part.devices):
                arrays[number] = jax.block_until_ready(
                    _put_part(arrays[number], jax.device_put(host, device), starts)
                )
            self.meter.add(host.nbytes)
        return arrays

    def _ahead(self) -> Iterator[tuple[Chunk, npt.NDArray[np.generic]]]:
        waiting: deque[tuple[Chunk, Future[npt.NDArray[np.generic]]]] = deque()
        for chunk in self.chunks:
            waiting.append((chunk, self.readers.submit(self._read, chunk)))
            if len(waiting) > AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def _read(self, chunk: Chunk) -> npt.NDArray[np.generic]:
        host = np.empty(chunk.shape, self.kind)
        self._fill(chunk, host)
        return host

    def _fill(self, chunk: Chunk, out: npt.NDArray[np.generic]) -> None:
        self.reader.fill(self.part.path, chunk.piece, chunk.index, out[0] if self.stacked else out)


def _put_part_of(array: jax.Array, part: jax.Array, starts: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, part, list(starts))


_put_part = jax.jit(_put_part_of, donate_argnums=0)  # in place
