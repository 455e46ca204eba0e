"""Progress bars in bytes on stderr."""

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
