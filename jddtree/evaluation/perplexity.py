"""Perplexity of the target on a text of any length.

Contract: every token but the first is scored exactly once (the first too where the model puts a prefix before
raw texts). A text longer than the context is read in windows that overlap by half, so that each token past
the first window sees at least half a context. Units as in lm-eval: word and byte perplexity divide by the
words (split at whitespace) and UTF-8 bytes of the text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jddtree.errors import UserError
from jddtree.evaluation.likelihood import Scorer


class Window(NamedTuple):
    """Tokens `begin` to `end` are read, those from `scored` on count; half-open."""

    begin: int
    scored: int
    end: int


def windows(count: int, context: int, first: int = 1) -> Iterator[Window]:
    """Windows over `count` tokens, of at most `context`; the tokens before `first` are never scored."""
    end = min(context, count)
    yield Window(0, first, end)
    while end < count:
        scored, end = end, min(end + context - context // 2, count)
        yield Window(end - min(context, end), scored, end)


def log_likelihood(
    scorer: Scorer, tokens: Sequence[int], first: int = 1, progress: Callable[[int, int], None] | None = None
) -> float:
    """Sum of the natural log-probabilities of tokens[first:], each given what its window holds before it.

    progress: called with tokens read and in all. Raises UserError for fewer than 2 tokens.
    """
    total = 0.0
    for window in windows(len(tokens), scorer.context, first):
        scores = scorer.score(tokens[window.begin : window.end])
        total += float(scores.log_probs[window.scored - window.begin - 1 :].sum(dtype=float))
        if progress is not None:
            progress(window.end, len(tokens))
    return total


def perplexity(
    scorer: Scorer,
    text: str,
    tokens: Sequence[int],
    prefix: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float | int]:
    """Measures of a text whose ids are `tokens`; `prefix`: ids read before it and not scored.

    Returns tokens (scored), log_likelihood (nats), token_perplexity, word_perplexity, byte_perplexity,
    bits_per_byte. Raises UserError for a text without a token to score.
    """
    first = max(len(prefix), 1)
    scored = len(prefix) + len(tokens) - first
    if scored < 1:
        raise UserError(
            f"the text has {len(tokens)} tokens, but at least 1 must be scored; give a longer file"
        )
    total = log_likelihood(scorer, [*prefix, *tokens], first, progress)
    words, size = max(len(text.split()), 1), len(text.encode("utf-8"))
    return {
        "tokens": scored,
        "log_likelihood": total,
        "token_perplexity": math.exp(-total / scored),
        "word_perplexity": math.exp(min(-total / words, 700.0)),
        "byte_perplexity": math.exp(-total / size),
        "bits_per_byte": -total / size / math.log(2),
    }
