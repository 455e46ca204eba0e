"""Writing files so that they are still there after a power failure."""

import os
from pathlib import Path

PARTIAL = ".partial"


def write_at(path: Path, data: memoryview, offset: int) -> None:
    """Write all of `data` into a file, which is made when it is not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Make or replace a text file; whenever it stops, the file is the old one or all of the new one."""
    temporary = path.with_name(path.name + PARTIAL)
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    temporary.rename(path)
    sync_folder(path.parent)
