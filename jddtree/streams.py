"""Standard streams that are closed, full, or cannot hold every character.

Contract after `prepare`: descriptors 0 to 2 are open, so that no file that is opened later takes the place of
a closed stream. Writing to stdout never fails for a character (what its encoding lacks is written as an
escape like \\xe9); where it fails otherwise, that is one `UserError`, or a BrokenPipeError when the reader
went away. Writing to stderr never fails: what cannot be said is lost, and the work goes on.
"""

import io
import os
import sys
from typing import Any, TextIO

from jddtree.errors import UserError


def prepare() -> None:
    """Make Python's standard streams what the contract says. Raises UserError when stdout is closed."""
    closed = [number for number in range(3) if not _is_open(number)]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    sys.stderr = message_stream(2, sys.stderr)
    if 1 in closed or sys.stdout is None:
        raise UserError(
            "standard output is closed, so no answer can be written; send it to a file or to /dev/null"
        )
    sys.stdout = answer_stream(1, sys.stdout)


def answer_stream(descriptor: int, like: TextIO) -> TextIO:
    """A stdout on a descriptor, with the encoding and buffering of another text stream."""
    return _text(_Answer(descriptor, "w", closefd=False), like)


def message_stream(descriptor: int, like: TextIO | None) -> TextIO:
    """A stderr on a descriptor; without a stream to be like, it is UTF-8."""
    return _text(_Messages(descriptor, "w", closefd=False), like)


def finish_answer() -> bool:
    """Flush stdout; returns whether all of it was written.

    What was not is given up, because Python would try once more at its exit and complain.
    """
    try:
        sys.stdout.flush()
        return True
    except (OSError, UserError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


class _Answer(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"standard output cannot be written ({error.strerror}); send it to where there is room"
            ) from None


class _Messages(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _text(raw: io.FileIO, like: TextIO | None) -> TextIO:
    encoding = "utf-8" if like is None else like.encoding
    by_line = isinstance(raw, _Messages) or bool(like and like.line_buffering)
    at_once = bool(getattr(like, "write_through", False))
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=by_line, write_through=at_once
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
