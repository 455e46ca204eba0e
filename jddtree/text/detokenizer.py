"""Token ids that arrive in pieces, turned into text without ever splitting a character.

Contract: for every grouping of the ids, the concatenated pieces equal the text of all ids decoded at once.
Bytes that may still become a character are held until more ids arrive or `finish` is called.
"""

import codecs
from collections.abc import Iterable

from jddtree.text.tokenizer import Tokenizer


class Detokenizer:
    """Streams the text of one sequence; skipped ids (such as stop tokens) leave no text."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int] = frozenset()):
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids; raises UserError for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.decode_bytes(i for i in ids if i not in self._skip))

    def finish(self) -> str:
        """Text of the bytes still held (U+FFFD for a character that never ended); the object is fresh again
        after.
        """
        return self._decoder.decode(b"", final=True)
