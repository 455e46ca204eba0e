"""Ctrl-C: one line and the end of the process, at once where there is nothing to keep, else GRACE seconds
later.

Where a command has something to keep (text, statistics, a journal) it calls `keep`, and Ctrl-C raises
KeyboardInterrupt from then on. An exception does not end a process for sure: modules that are being imported
turn it into another one, a C++ compiler is not interrupted, callbacks swallow it, threads are waited for. So
a thread of its own, which the operating system's handler wakes even while the main thread is in C++, ends the
process in any case.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

EXIT_CODE = 130
GRACE = 1.5  # seconds to keep what there is
LINE = "interrupted"


class Interrupts:
    """The handler. keeps: it raises; asked: Ctrl-C was pressed; reported: the user was told so, in whatever
    form.
    """

    def __init__(self) -> None:
        self.keeps = False
        self.asked = False
        self.reported = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process, or raise KeyboardInterrupt, once: another one would hit the code that keeps
        things.
        """
        if self.asked:
            return
        self.asked = True
        if self.keeps:
            raise KeyboardInterrupt
        with suppress(Exception):
            sys.stdout.flush()
        self.report()
        os._exit(EXIT_CODE)

    def report(self) -> None:
        """Say LINE on stderr unless the user knows already."""
        if not self.reported:
            self.reported = True
            start = "\n" if os.isatty(2) else ""  # a terminal shows ^C, perhaps behind a bar
            with suppress(OSError):
                os.write(2, f"{start}{LINE}\n".encode())


def install() -> None:
    """Handle Ctrl-C from now on; where it is ignored, as under nohup, it stays so.

    Descriptors 0 to 2 must be open, as `jddtree.streams.prepare` makes them.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    handler = Interrupts()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_end_later, args=(handler, reading), daemon=True).start()
    sys.unraisablehook = partial(_without_interrupts, sys.unraisablehook)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, handler)


def installed() -> Interrupts | None:
    """The handler, None where `install` was not called."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, Interrupts) else None


def keep() -> None:
    """From now on there is something to keep: Ctrl-C raises KeyboardInterrupt."""
    if (handler := installed()) is not None:
        handler.keeps = True


def hand_over(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let another handler hear Ctrl-C from now on, for a command that goes on after it."""
    if installed() is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, handler)


def ignore() -> None:
    """The work is done and its exit code stands; Ctrl-C would only end Python's own cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def asked() -> bool:
    """Whether Ctrl-C was pressed, also where the exception got lost."""
    handler = installed()
    return handler is not None and handler.asked


def mark_reported() -> None:
    """What was written says that the run was interrupted: nothing else has to."""
    if (handler := installed()) is not None:
        handler.reported = True


def report() -> int:
    """Say that the run was interrupted, unless that is known; returns the exit code."""
    handler = installed() or Interrupts()
    handler.report()
    return EXIT_CODE


def _end_later(handler: Interrupts, reading: int) -> None:
    while os.read(reading, 1)[0] != signal.SIGINT:
        pass
    time.sleep(GRACE)
    handler.report()
    os._exit(EXIT_CODE)


def _without_interrupts(show: Any, unraisable: Any) -> None:
    """A KeyboardInterrupt that a callback cannot raise is no defect to show."""
    if unraisable.exc_type is not KeyboardInterrupt:
        show(unraisable)
