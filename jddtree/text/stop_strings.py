"""Cut streamed text right before the first stop string.

Contract: what comes out does not depend on how the text was split. The first stop string to be complete wins;
of two that end together, the one that begins first. Text that may be the beginning of a stop string is held
back until more text decides.
"""

from collections.abc import Iterable

from jddtree.errors import UserError


class StopStrings:
    """Filter for one sequence; `found` is the stop string that ended it, or None."""

    def __init__(self, stops: Iterable[str]):
        """Raises UserError when a stop is empty or not a string."""
        self._stops = tuple(stops)
        for index, stop in enumerate(self._stops):
            if not isinstance(stop, str) or not stop:
                raise UserError(f"stop string {index} is {stop!r}, expected a text of at least one character")
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text now certain to come before any stop string; empty for ever after a stop was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        complete = [
            (begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0
        ]
        if complete:
            _, cut, self.found = min(complete)
            self._held = ""
        else:
            cut = len(text) - self._undecided(text)
            self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """End of the sequence: the text held back, which no longer can become a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0
