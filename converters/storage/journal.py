"""The journal of a conversion: which blocks are on the disk, and their checksums. It is what resuming starts
from.

A text file: the identity of the conversion in the first line, then one line for each finished block. Lines
are added only after the blocks' data was synced, so what it says holds after a power failure too. A last line
that was cut off is dropped, and a line that says something else is dropped with all that follow it. A lock
keeps a second conversion out of the same folder.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.storage.disk import sync_folder
from converters.storage.manifest import JOURNAL, VERSION, fingerprint
from jddtree import strict_json
from jddtree.errors import UserError

Sums = tuple[int, ...]  # CRC-32 of a block in each of its files


class Journal:
    """The open journal of a folder.

    header: the identity it was begun with, None when it is new or `fresh`. done: sums by block number.
    Raises UserError when another process holds it, and, unless `fresh`, when it is of another version.
    """

    def __init__(self, directory: Path, *, fresh: bool = False):
        self.directory, self.path = directory, directory / JOURNAL
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _locked(self._file):
            os.close(self._file)
            raise UserError(f"another conversion is writing to {directory}; wait for it to end")
        self.header: Mapping[str, Any] | None = None
        self.done: dict[int, Sums] = {}
        try:
            if not fresh:
                self._read()
        except UserError:
            self.close()
            raise

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Start over with a new identity."""
        os.ftruncate(self._file, 0)
        self.header, self.done = identity, {}
        self._append([json.dumps({"version": VERSION, "identity": identity})])
        sync_folder(self.directory)

    def add(self, blocks: Mapping[int, Sums]) -> None:
        """Note blocks whose data is on the disk."""
        self._append([json.dumps([number, *sums]) for number, sums in blocks.items()])
        self.done |= blocks

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._file)

    def _append(self, lines: list[str]) -> None:
        data = "".join(line + "\n" for line in lines).encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)  # no half line, which would hide all lines after it
            raise

    def _read(self) -> None:
        lines = self._lines()
        kept = 0
        for number, line in enumerate(lines):
            try:
                value = strict_json.parse(line)
                if number:
                    self.done |= _block(value)
                else:
                    self._check(value)
                    self.header = _identity(value["identity"])
            except (ValueError, TypeError, KeyError, AttributeError):
                break
            kept += len(line)
        os.ftruncate(self._file, kept)

    def _lines(self) -> list[bytes]:
        """The lines that were written to their end."""
        try:
            raw = strict_json.read_bytes(self.path)
        except ValueError as error:
            raise UserError(f"{self.path} cannot be read ({error}); start over with --force") from None
        return raw[: raw.rfind(b"\n") + 1].splitlines(keepends=True)

    def _check(self, value: Mapping[str, Any]) -> None:
        if value["version"] != VERSION:
            raise UserError(
                f"{self.directory} was begun by another version (store version {value['version']}, this "
                f"program writes {VERSION}); start over with --force"
            )


def _block(value: Any) -> dict[int, Sums]:
    """A block's number and its sums. ValueError where the line holds something else."""
    if not isinstance(value, list) or len(value) < 2 or not all(type(item) is int for item in value):
        raise ValueError("a block is its number and its sums")
    number, *sums = value
    if number < 0 or not all(0 <= item < 1 << 32 for item in sums):
        raise ValueError("a number below 0, or no CRC-32")
    return {number: tuple(sums)}


def _identity(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The identity of a conversion (`plan.Plan.identity`), of which the parts' fingerprints are checked."""
    for part in value["parts"].values():
        fingerprint(part)
    return value


def _locked(descriptor: int) -> bool:
    """Lock a file; False when another process did. Where the file system has no locks nothing is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
