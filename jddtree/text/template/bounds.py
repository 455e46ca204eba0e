"""What one rendering of a chat template may use: processor time, sizes of values, depth of nesting.

Contract: a template is a file that came with a model, so its loops, products and macros may be endless. The
sandbox asks a `Budget` at every loop turn, call, filter, operator and piece of output; past a limit it raises
`TemplateLimit`. Nothing here needs signals, so the limits hold in every thread. One operation in C is never
interrupted, but its operands are bounded, so it ends soon.

The limits: MAX_SECONDS of processor time of the rendering thread; MAX_SIZE for one value and for the whole
prompt, where a character counts 1 and every item of a list or an object NODE_SIZE; MAX_TOTAL for everything
that is built on the way; MAX_DEPTH levels of lists inside lists; MAX_WIDTH for paddings and precisions;
MAX_BITS for whole numbers. Jinja's sandbox adds 100,000 numbers per `range`.
"""

import time
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_SOURCE = 2**16
"""Characters of a template's source; published ones have up to some 30,000."""
MAX_SECONDS = 5.0
MAX_SIZE = 2**24
MAX_TOTAL = 2**30
MAX_DEPTH = 200
MAX_WIDTH = 2**16
MAX_BITS = 2**16
NODE_SIZE = 64
"""Bytes that an item of a list or an object takes besides its text, about."""


class TemplateLimit(Exception):
    """A template went past a limit; the message names it."""


class Extent(NamedTuple):
    """Size of a value with everything inside it, as often as it is there, and its levels of nesting."""

    size: int
    depth: int


_TEXTS = (str, bytes)
_ATOMS = frozenset({int, float, bool, type(None)})
_ATOM = Extent(NODE_SIZE, 0)


class Budget:
    """What one rendering has used so far; used by one thread."""

    def __init__(self) -> None:
        """Start the clock of this thread."""
        self._end = time.thread_time() + MAX_SECONDS
        self._total = 0
        # The values are kept, so that no other value takes their place in memory; a sandboxed template
        # mutates none.
        self._known: dict[int, tuple[Any, Extent]] = {}

    def check_time(self) -> None:
        """Raise TemplateLimit when the time is over."""
        if time.thread_time() > self._end:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds of processor time")

    def admit(self, value: Any) -> Any:
        """The value, which a step of the template built, when it is within the limits."""
        self.check_time()
        size, depth = self._extent(value)
        check_size(size)
        if depth > MAX_DEPTH:
            raise TemplateLimit(f"it nests values deeper than {MAX_DEPTH} levels")
        items = children(value)
        self._total += size if items is None else NODE_SIZE * len(value)
        if self._total > MAX_TOTAL:
            raise TemplateLimit(f"its values take more than {MAX_TOTAL} characters in all")
        return value

    def admit_sum(self, left: Any, right: Any, value: Any) -> Any:
        """As `admit` for the sum of two values; of lists only the two extents are added up."""
        if isinstance(value, list | tuple):
            first = self._extent(left)
            second = self._extent(right)
            extent = Extent(first.size + second.size - NODE_SIZE, max(first.depth, second.depth))
            self._known[id(value)] = value, extent
        return self.admit(value)

    def _extent(self, value: Any) -> Extent:
        if isinstance(value, _TEXTS):
            return Extent(len(value), 0)
        if type(value) in _ATOMS:
            return _ATOM
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        items = children(value)
        if items is None:
            return _ATOM
        extents = [self._extent(item) for item in items]
        size = NODE_SIZE + sum(NODE_SIZE + extent.size for extent in extents)
        depth = 1 + max((extent.depth for extent in extents), default=0)
        self._known[id(value)] = value, Extent(size, depth)
        return Extent(size, depth)


def children(value: Any) -> Iterable[Any] | None:
    """What a list or an object holds, keys included; None for every other value."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, KeysView | ValuesView | ItemsView):
        value = getattr(value, "mapping", value)
    if not isinstance(value, dict | MappingProxyType):
        return None
    return chain(value.keys(), value.values())


def check_size(size: int) -> None:
    """Raise TemplateLimit for a value that is larger than MAX_SIZE."""
    if size > MAX_SIZE:
        raise TemplateLimit(f"it builds a value of more than {MAX_SIZE} characters")


def check_width(*widths: Any) -> None:
    """Raise TemplateLimit for a number beyond MAX_WIDTH among paddings and precisions."""
    for width in widths:
        if isinstance(width, int) and abs(width) > MAX_WIDTH:
            raise TemplateLimit(f"it pads or cuts to more than {MAX_WIDTH} places")


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimit when the result of a binary operator would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        _check_numbers(operator, left, right)
    elif operator == "*":
        count, repeated = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(repeated, str | bytes | list | tuple):
            check_size(count * len(repeated) * (1 if isinstance(repeated, str | bytes) else NODE_SIZE))
    elif operator == "%" and isinstance(left, bytes):
        raise TemplateLimit("it formats bytes")


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length() if operator == "*" else 0
    if operator == "**":
        bits = left.bit_length() * abs(right)
    if bits > MAX_BITS:
        raise TemplateLimit(f"it computes whole numbers of more than {MAX_BITS} bits")
