"""Files that users name on the command line: read whole but never without end, and tried before hours are
spent.

Contract: every complaint is a `UserError` that begins with the flag and the path.
"""

import os
import tempfile
from pathlib import Path

from jddtree.errors import UserError

MOST_BYTES = 128 << 20


def read_bytes(path: Path, flag: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, a pipe or a device. Raises UserError when it cannot be read or has more than
    `most`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be read ({reason(error)}); check the path") from None
    check_size(data, f"{flag} {path}", most)
    return data


def read_text(path: Path, flag: str, most: int = MOST_BYTES) -> str:
    """The text of a file, without a byte order mark. Raises UserError as `read_bytes`, and for what is not
    UTF-8.
    """
    return decoded(read_bytes(path, flag, most), f"{flag} {path}")


def check_size(data: bytes, name: str, most: int) -> None:
    """Raise UserError for more than `most` bytes."""
    if len(data) > most:
        raise UserError(
            f"{name} has more than {most:,} bytes, which is the most that is read; give a smaller one"
        )


def decoded(data: bytes, name: str) -> str:
    """The text of bytes in UTF-8, without a byte order mark. Raises UserError for other bytes."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from None


def check_new_file(path: Path | None, flag: str) -> None:
    """Raise UserError for a file that could not be written; None is none. Missing folders are made."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise UserError(f"{flag} {path} is a folder, not a file; give the path of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        _try_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be written ({reason(error)}); check the path") from None


def check_new_folder(path: Path | None, flag: str) -> None:
    """Raise UserError for a folder that could not be made or written into; None is none. It is made."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be written ({reason(error)}); check the path") from None


def reason(error: OSError | ValueError) -> str:
    """Why the system refused a path; a path with a NUL character is a ValueError."""
    return getattr(error, "strerror", None) or str(error)


def _try_file(path: Path) -> None:
    """Open for appending, which changes nothing; what was not there is removed again. Pipes would see the
    closing.
    """
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):
            raise PermissionError(None, "it may not be written")
        return
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()
