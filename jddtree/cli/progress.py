"""Progress bars on stderr: of bytes, and of things done."""

import time
from types import TracebackType

from tqdm import tqdm


class Bars:
    """One bar after the other, each for a stage; `silent` shows none."""

    def __init__(self, silent: bool, prefix: str = ""):
        self.silent, self.prefix, self.stage = silent, prefix, ""
        self.bar: tqdm | None = None

    def __enter__(self) -> "Bars":
        return self

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a stage are done; what was there at its start does not count as
        speed.
        """
        if self.bar is None or stage != self.stage:
            self.close()
            self.stage, name = stage, self.prefix + stage
            self.bar = tqdm(desc=name, initial=done, total=total, unit="B", unit_scale=True, disable=self.silent)
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
        """Show `done` of `total`, tokens per second since the stage began, and a note like the running score."""
        if self.bar is None or stage != self.stage:
            self.close()
            self.stage, self.begun, self.before = stage, time.perf_counter(), tokens or 0
            self.bar = tqdm(desc=stage, initial=done, total=total, disable=self.silent)
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
