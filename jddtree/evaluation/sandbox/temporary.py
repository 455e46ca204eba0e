"""A temporary folder that can be removed whatever a program left in it.

Contract: nothing in the folder makes the removal raise, recurse or follow a link: folders of any depth and
mode, odd names, links to elsewhere. What cannot be removed (for lack of rights, say) stays, without a word.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from itertools import count


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """The path of a new empty folder; at the end it is removed."""
    path = tempfile.mkdtemp(prefix=prefix)
    # The folder itself, whatever its path leads to later.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            _empty(folder)
        os.close(folder)
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _empty(folder: int) -> None:
    """Remove everything in an open folder, level by level: what lies in a subfolder is first lifted into the
    folder
    """
    os.fchmod(folder, 0o700)
    taken = set(names := os.listdir(folder))
    fresh = (name for number in count() if (name := f"lifted-{number}") not in taken)
    while any([_removed(folder, name, fresh) for name in names]):
        names = os.listdir(folder)


def _removed(folder: int, name: str, fresh: Iterator[str]) -> bool:
    """Remove one entry; whether it is gone"""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    with contextlib.suppress(OSError):
        _lift_entries(folder, name, fresh)
        os.rmdir(name, dir_fd=folder)
        return True
    return False


def _lift_entries(folder: int, name: str, fresh: Iterator[str]) -> None:
    """Empty a subfolder: folders in it move up, the rest goes"""
    _make_writable(folder, name)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for entry in os.listdir(inner):
            _lift(inner, entry, folder, fresh)
    finally:
        os.close(inner)


def _lift(inner: int, name: str, folder: int, fresh: Iterator[str]) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=inner)
        return
    with contextlib.suppress(OSError):
        _make_writable(inner, name)  # moving a folder changes its `..`
        os.rename(name, next(fresh), src_dir_fd=inner, dst_dir_fd=folder)


def _make_writable(folder: int, name: str) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.chmod(name, 0o700, dir_fd=folder)
