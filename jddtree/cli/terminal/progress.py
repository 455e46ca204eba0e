"""Progress on stderr: bars of bytes and of things done, and a word before what takes long."""

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from jddtree.limits import slowness


def progress_bar(items: Any = None, *, silent: bool = False, **options: Any) -> tqdm:
    """A bar of tqdm, which takes `items` and `options`; none where it is `silent` or there is no stderr."""
    return tqdm(items, disable=silent or sys.stderr is None, **options)


def say_slow(rows: int, silent: bool = False) -> None:
    """Say that compiling for trees of so many rows takes long, where it does."""
    word = slowness(rows)
    if word is not None and not silent:
        print(word, file=sys.stderr)


class Bars:
    """One bar after the other, each for a stage; `silent` shows none."""

    def __init__(self, silent: bool, prefix: str = ""):
        self.silent, self.prefix, self.stage = silent, prefix, ""
        self.bar: tqdm | None = None

    def __enter__(self) -> "Bars":
        return self

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a stage are done; what was there at its start does not count
        as speed.
        """
        if self.bar is None or stage != self.stage:
            self.close()
            self.stage, name = stage, self.prefix + stage
            self.bar = progress_bar(
                silent=self.silent, desc=name, initial=done, total=total, unit="B", unit_scale=True
            )
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """End the bar being shown."""
        if self.bar is not None:
            self.bar.close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Counter:
    """One bar after the other on stderr, each for a stage, that counts things done; `silent` shows none."""

    def __init__(self, silent: bool):
        self.silent, self.stage = silent, ""
        self.bar: tqdm | None = None
        self.begun, self.before = 0.0, 0

    def __enter__(self) -> "Counter":
        return self

    def update(self, stage: str, done: int, total: int, tokens: int | None = None, note: str = "") -> None:
        """Show `done` of `total`, tokens per second since the stage began, and a note like the running
        score.
        """
        if self.bar is None or stage != self.stage:
            self.close()
            self.stage, self.begun, self.before = stage, time.perf_counter(), tokens or 0
            self.bar = progress_bar(silent=self.silent, desc=stage, initial=done, total=total)
        if tokens is not None:
            speed = (tokens - self.before) / max(time.perf_counter() - self.begun, 1e-9)
            note = f"{speed:.1f} tokens/s{', ' if note else ''}{note}"
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """End the bar being shown."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def __exit__(self, *_: object) -> None:
        self.close()
