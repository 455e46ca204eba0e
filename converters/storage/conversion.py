"""One run of a conversion: streaming, in bounded memory, resumable at any moment.

Every block of `converters.storage.plan` is read, brought to the store's order, summed and written to its
place by one thread, so memory is that of a few blocks (an expert, or 32 MiB) and files are read from front to
back. Finished blocks are synced and then noted in the journal; a run that finds a journal does what is
missing. A block always gives the same bytes, so the finished store does not show how often it was
interrupted. The manifest comes last.
"""

import errno
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from converters.pieces import Block, layout, refuse, whole, workers
from converters.storage.crc import crc32, joined
from converters.storage.disk import PARTIAL, sync_file, sync_folder, write_at, write_whole
from converters.storage.journal import Journal, Sums
from converters.storage.manifest import MANIFEST, PARTS, File, Part, file_name, manifest_text
from converters.storage.plan import PartPlan, Plan, changes, unchanged
from converters.storage.store import sum_of_file
from jddtree.errors import UserError

SYNC_BYTES = 512 << 20  # written between two syncs: the most that an interruption loses
FULL = (errno.ENOSPC, errno.EDQUOT)
GB = 1e9

StageProgress = Callable[[str, int, int], None]


class Conversion:
    """One run."""

    def __init__(self, plan: Plan, out: Path, progress: StageProgress | None):
        self.plan, self.out, self.progress = plan, out, progress
        self.sizes = [_block_bytes(part, block) for part, block in plan.blocks]
        self.unsynced: dict[int, Sums] = {}
        self.written, self.resumed, self.sure = 0, 0, True

    def run(self, force: bool) -> tuple[int, int]:
        """Returns (bytes written, bytes found written)."""
        with self._one_line():
            self.out.mkdir(parents=True, exist_ok=True)
            self.journal = Journal(self.out, fresh=force)
            with closing(self.journal):
                self._begin(force)
                self.resumed = sum(self.sizes[number] for number in self.journal.done)
                self._require_space()
                self._make_folders()
                self._write_blocks()
                self._finish()
        return self.written, self.resumed

    def _begin(self, force: bool) -> None:
        """Take over what an earlier run left, or start over."""
        identity, header = self.plan.identity(), self.journal.header
        if force:
            _clear(self.out)
        if header is None:
            self.journal.begin(identity)
        elif header != identity:
            found = changes(header, identity) or ["the program"]
            raise UserError(
                f"the source changed since the conversion into {self.out} began: {', '.join(found)}; put "
                "back what it was, or start over with --force"
            )
        lost = [number for number in self.journal.done if not self._present(number)]
        for number in lost:
            del self.journal.done[number]

    def _present(self, number: int) -> bool:
        """Whether a noted block exists with a sum for each file, and its files are still long enough to hold
        it.
        """
        if number >= len(self.plan.blocks):
            return False
        part, block = self.plan.blocks[number]
        if len(self.journal.done[number]) != len(block.paths):
            return False
        for path, name in _files(part, block):
            file = self.out / part.name / name
            if not file.is_file() or file.stat().st_size < block.stop * _row_bytes(part, path):
                return False
        return True

    def _require_space(self) -> None:
        there = sum(path.stat().st_blocks * 512 for path in self.out.rglob("*.bin"))
        missing, free = self.plan.nbytes - there, shutil.disk_usage(self.out).free
        if missing > free:
            raise self._no_space(missing, free)

    def _no_space(self, missing: int, free: int) -> UserError:
        return UserError(
            f"the disk of {self.out} is too full: the store needs {self.plan.nbytes / GB:.3f} GB, of "
            f"which {max(0, missing) / GB:.3f} GB are not written yet, and {free / GB:.3f} GB are free; "
            "make room and run the same command again, it resumes"
        )

    def _no_such_size(self) -> UserError:
        largest = max(size for part in self.plan.parts for size in part.sizes.values())
        return UserError(
            f"a file of {self.out} would be larger than this process may write (ulimit -f) or its file "
            f"system allows: the largest has {largest / GB:.3f} GB; raise that limit and run the same "
            "command again, it resumes"
        )

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """What the system refuses is a UserError, a full disk and a file-size limit with the numbers."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self._no_such_size() from None
            if error.errno not in FULL:
                raise UserError(
                    f"the conversion into {self.out} cannot go on: {error}; mend that and run the same "
                    "command again, it resumes"
                ) from None
            missing = self.plan.nbytes - self.resumed - self.written
            raise self._no_space(missing, shutil.disk_usage(self.out).free) from None

    def _make_folders(self) -> None:
        for part in self.plan.parts:
            for name in part.sizes:
                (self.out / part.name / name).parent.mkdir(parents=True, exist_ok=True)

    def _write_blocks(self) -> None:
        """Write what the journal lacks; when anything stops it, note what is done."""
        left = [number for number in range(len(self.plan.blocks)) if number not in self.journal.done]
        self._report()
        pool = ThreadPoolExecutor(workers())
        futures: list[tuple[int, Future[Sums]]] = []
        try:
            futures = [(number, pool.submit(self._write, *self.plan.blocks[number])) for number in left]
            waiting = 0
            for number, future in futures:
                self.unsynced[number] = future.result()
                self.written += self.sizes[number]
                waiting += self.sizes[number]
                if waiting >= SYNC_BYTES:
                    self._sync()
                    waiting = 0
                self._report()
            self._sync()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            self._save(futures)
            raise
        pool.shutdown()

    def _write(self, part: PartPlan, block: Block) -> Sums:
        """Convert one block. Returns the checksums of its bytes in each of its files."""
        refuse(part.folder, part.reader.wrong(block))
        sums = []
        for path, name in _files(part, block):
            shape = (block.stop - block.start, *layout(part.reader.table, path).shape[1:])
            values = np.empty(shape, part.reader.stored(path))
            part.reader.fill(path, block.piece, (slice(block.start, block.stop), *whole(shape[1:])), values)
            data = values.reshape(-1).view(np.uint8).data
            write_at(self.out / part.name / name, data, block.start * _row_bytes(part, path))
            sums.append(crc32(data))
        return tuple(sums)

    def _save(self, futures: list[tuple[int, Future[Sums]]]) -> None:
        """After a failure: note every block that was finished, if the disk allows it."""
        if not self.sure:
            return
        for number, future in futures:
            if future.done() and not future.cancelled() and future.exception() is None:
                if number not in self.journal.done:
                    self.unsynced[number] = future.result()
        try:
            self._sync()
        except OSError:
            pass  # they are done again

    def _sync(self) -> None:
        """Note all written blocks once their data is on the disk. After an error nobody knows what is."""
        self.sure = False
        blocks = [self.plan.blocks[number] for number in self.unsynced]
        for name in sorted(
            {f"{part.name}/{name}" for part, block in blocks for _, name in _files(part, block)}
        ):
            sync_file(self.out / name)
        self.journal.add(self.unsynced)
        self.unsynced, self.sure = {}, True

    def _finish(self) -> None:
        """Copy the small files, write the manifest, forget the journal."""
        parts = {}
        for part in self.plan.parts:
            sums = self._sums(part)
            for name in part.copied:
                target = self.out / part.name / name
                shutil.copyfile(part.folder / name, target)
                sync_file(target)
                sums[name] = File(target.stat().st_size, sum_of_file(target))
            parameters = {
                path: (entry.shape, part.reader.stored(path).name)
                for path, entry in part.reader.table.items()
            }
            parts[part.name] = Part(part.source, parameters, sums)
        for part in self.plan.parts:
            if not unchanged(part):
                raise UserError(
                    f"{part.folder} changed while it was converted; put back what it was, or start over "
                    "with --force"
                )
        for folder in {path.parent for path in self.out.rglob("*") if path.is_file()}:
            sync_folder(folder)
        write_whole(self.out / MANIFEST, manifest_text(parts) + "\n")
        self.journal.path.unlink()

    def _sums(self, part: PartPlan) -> dict[str, File]:
        """The .bin files, from the checksums of their blocks."""
        blocks: dict[str, list[tuple[int, int, int]]] = {name: [] for name in part.sizes}
        for number, (owner, block) in enumerate(self.plan.blocks):
            if owner.name == part.name:
                for (path, name), value in zip(_files(part, block), self.journal.done[number], strict=True):
                    size = (block.stop - block.start) * _row_bytes(part, path)
                    blocks[name].append((block.start, value, size))
        return {
            name: File(part.sizes[name], joined((value, size) for _, value, size in sorted(found)))
            for name, found in blocks.items()
        }

    def _report(self) -> None:
        if self.progress is not None:
            self.progress("Converting", self.resumed + self.written, self.plan.nbytes)


def _clear(out: Path) -> None:
    """Remove a store or what there is of one; the manifest first, so that what is left does not look
    complete.
    """
    for name in (MANIFEST, MANIFEST + PARTIAL):
        (out / name).unlink(missing_ok=True)
    for name in PARTS:
        shutil.rmtree(out / name, ignore_errors=True)


def _files(part: PartPlan, block: Block) -> Iterator[tuple[str, str]]:
    """(path, file name) of everything that a block is written to."""
    for path in block.paths:
        yield path, file_name(path, layout(part.reader.table, path), block.piece)


def _row_bytes(part: PartPlan, path: str) -> int:
    cut = layout(part.reader.table, path)
    return part.sizes[file_name(path, cut, 0)] // cut.shape[0]


def _block_bytes(part: PartPlan, block: Block) -> int:
    return (block.stop - block.start) * sum(_row_bytes(part, path) for path in block.paths)
