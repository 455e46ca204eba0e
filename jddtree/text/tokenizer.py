"""Kimi K2.6 tokenizer: text to token ids and back.

Contract: ids equal those of the published tokenizer for every string, including the seams it makes in long
texts. Text is never read as control tokens unless `allow_special` is given, so text from users is safe by
default. No beginning or end token is ever added. Source of all rules: `tokenization_kimi.py`, published
beside K2.6's weights.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tiktoken

from jddtree.errors import UserError
from jddtree.text.token_files import read_ranks, read_special_tokens

CHUNK_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000

_RUN = re.compile(r"\s+|\S+")

# Cased letters without Han characters, in the class intersection syntax of tiktoken's regex engine.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The eight alternatives in the order in which they are tried."""


def seams(text: str) -> Iterator[tuple[int, int]]:
    """Half-open character ranges of `text` that are tokenised separately.

    The text is cut every 400,000 characters, and inside such a chunk whenever 25,000 characters in a row were
    all whitespace or all not whitespace. The cuts change the ids next to them, so an exact tokenizer must
    repeat them.
    """
    for chunk in range(0, len(text), CHUNK_CHARACTERS):
        chunk_end = min(chunk + CHUNK_CHARACTERS, len(text))
        start = chunk
        for run in _RUN.finditer(text, chunk, chunk_end):
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield start, cut
                start = cut
        yield start, chunk_end


class Tokenizer:
    """Byte-pair tokenizer with special tokens at fixed ids; immutable after construction."""

    def __init__(self, ranks: Mapping[bytes, int], special_tokens: Mapping[str, int]):
        """Build from token bytes to rank (0..n-1) and special token name to id (the ids that follow)."""
        self._specials = dict(special_tokens)
        self._encoding = tiktoken.Encoding(
            name="kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens=self._specials
        )
        self._marker = re.compile(
            "|".join(re.escape(name) for name in sorted(self._specials, key=len, reverse=True))
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Read `tiktoken.model` and `tokenizer_config.json` of a model folder.

        Raises UserError when a file is missing or its content is not a complete vocabulary.
        """
        directory = Path(path)
        ranks = read_ranks(directory / "tiktoken.model")
        return cls(ranks, read_special_tokens(directory / "tokenizer_config.json", first_id=len(ranks)))

    @property
    def vocab_size(self) -> int:
        """Number of ids: ranks and special slots together."""
        return self._encoding.n_vocab

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Read-only map of every special token's name to its id, reserved slots included."""
        return MappingProxyType(self._specials)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        With `allow_special` the names of special tokens become their ids; use it only for text of known
        origin. Without it they are ordinary characters, and no text raises.
        """
        markers = self.find_markers(text) if allow_special else []
        return self.encode_with_markers(text, markers)

    def find_markers(self, text: str) -> list[tuple[int, int]]:
        """Half-open character ranges of the special token names in `text`, from left to right."""
        return [match.span() for match in self._marker.finditer(text)]

    def encode_with_markers(self, text: str, markers: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of `text` in which exactly the given ranges become special tokens.

        `markers` are ascending ranges as from `find_markers`. A name that is cut by a seam (see `seams`) is
        ordinary text, as in the published tokenizer.
        """
        ids: list[int] = []
        pending = iter(markers)
        marker = next(pending, None)
        for start, end in seams(text):
            while marker is not None and marker[0] < end:
                if marker[1] <= end:
                    ids += self._encoding.encode_ordinary(text[start : marker[0]])
                    ids.append(self._specials[text[marker[0] : marker[1]]])
                    start = marker[1]
                marker = next(pending, None)
            ids += self._encoding.encode_ordinary(text[start:end])
        return ids

    def token_bytes(self, identifier: int) -> bytes:
        """Bytes of one token; for a special token the UTF-8 bytes of its name.

        Raises UserError when the id is not in 0..vocab_size-1.
        """
        if not 0 <= identifier < self.vocab_size:
            raise UserError(
                f"token id {identifier} is outside 0..{self.vocab_size - 1}; use ids that come from this "
                "vocabulary"
            )
        return self._encoding.decode_single_token_bytes(identifier)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Concatenated bytes of the tokens; raises UserError for an id outside the vocabulary."""
        return b"".join(self.token_bytes(identifier) for identifier in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD. Raises UserError as `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")
