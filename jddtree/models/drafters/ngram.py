"""Prompt lookup: what followed the last tokens earlier in the same text is proposed again. It has no weights.

The end of prompt and answer, the root included, is looked for among all earlier places (prompt lookup decoding;
Yang et al., arXiv 2304.04487). The longest matches are taken, of equal ones the latest. A match of n tokens weighs
`SURER` ** n. A candidate's probability is the weight of the matches that it follows, divided by the weight of all and
1 for what was never said. So candidates of long matches, and those that follow many, come first.

Candidates are factorised: those of a depth are the union of what all matches say there, whatever was drafted before.
Along the top-1 chain this is exact, since there a match that agrees with the chain so far counts as that much longer.
Beside the chain a child may continue another match than its parent does; such a node is never accepted by mistake, it
is only wasted. Matches near the end of the text repeat what lies between them and the end.

A candidate is a token that was said and not a logit, so sampling noise has nothing to be added to: a request's coupling
changes nothing here, and samples stay what they are, as with any draft.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jddtree.errors import UserError
from jddtree.models.cache import append_rows
from jddtree.models.drafters.base import Candidates, Committed, Ranking
from jddtree.models.parameters import Tree
from jddtree.models.target import Target

SURER = 4.0


@dataclass(frozen=True)
class NgramConfig:
    """block_size: as in `DrafterConfig`. longest: tokens that are compared at most. matches: earlier places that are
    used at most, which also bounds the candidates of a depth.

    Raises UserError for numbers that leave nothing to propose.
    """

    kind: ClassVar[str] = "ngram"
    target_layer_ids: ClassVar[tuple[int, ...]] = ()
    block_size: int = 12
    longest: int = 8
    matches: int = 8

    def __post_init__(self) -> None:
        for name, least in (("block_size", 2), ("longest", 1), ("matches", 1)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"{name} of the ngram drafter is {value}, but must be at least {least}")

    @property
    def most_candidates(self) -> int:
        """See `DrafterConfig`."""
        return self.matches

    def of_target(self) -> dict[str, tuple[str, int]]:
        """See `DrafterConfig`; prompt lookup works for every target."""
        return {}


class History(NamedTuple):
    """The draft state: tokens int32 [B, S], of which a sequence's first ones, those that are committed, count."""

    tokens: jax.Array


class Matches(NamedTuple):
    """Earlier places that say how the text may go on, the best first: places int32 [B, M], of the token that the root
    repeats; lengths int32 [B, M], tokens up to there that are the text's last ones, 0 where there is no match.
    """

    places: jax.Array
    lengths: jax.Array


class Ngram:
    """Prompt lookup as a `jddtree.models.drafters.base.Drafter`, and its `Proposer`, as there are no weights."""

    def __init__(self, config: NgramConfig):
        self.config = config

    def shapes(self, sequences: int, context: int, dtype: jnp.dtype, arrays: Tree | None = None) -> History:
        """See `Drafter`."""
        tokens: Any = jax.ShapeDtypeStruct((sequences, context), jnp.int32)
        return History(tokens)

    def specs(self) -> History:
        """See `Drafter`; every rank holds the same history."""
        everywhere: Any = P()
        return History(everywhere)

    def over(self, arrays: Tree, target: Target, kernels: str | None) -> "Ngram":
        """See `Drafter`."""
        return self

    def observe(self, draft: History, committed: Committed) -> History:
        """See `Proposer`."""
        tokens, rows = draft.tokens[None], committed.tokens[None]
        return History(append_rows(tokens, rows, committed.start, committed.counts)[0])

    def propose(self, draft: History, root: jax.Array, lengths: jax.Array, ranking: Ranking) -> Candidates:
        """See `Proposer`."""
        position = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        text = jnp.where(position == lengths[:, None], root[:, None], draft.tokens)
        matches = find(text, lengths, self.config.longest, self.config.matches)
        following = continuations(text, lengths, matches.places, self.config.block_size - 1)
        return _first(candidates(following, matches.lengths, self.config.longest), ranking.count)


def find(text: jax.Array, last: jax.Array, longest: int, count: int) -> Matches:
    """The `count` longest matches of the text's end, of equal ones the latest.

    text: int32 [B, S]; last: int32 [B], the place of the last token; longest: tokens to compare at most.
    """
    size = text.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)[None]
    equal = jnp.broadcast_to(place < last[:, None], text.shape)
    length = jnp.zeros_like(text)
    for back in range(min(longest, size)):
        earlier = jnp.pad(text[:, : size - back], ((0, 0), (back, 0)))
        wanted = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1)
        equal &= (earlier == wanted) & (place >= back)  # so `last` is beyond `back` as well
        length += equal.astype(jnp.int32)
    best, places = lax.top_k(length * size + place, min(count, size))
    return Matches(places, best // size)


def continuations(text: jax.Array, last: jax.Array, places: jax.Array, depth: int) -> jax.Array:
    """The tokens that followed each place, int32 [depth, B, M]; past the text's end they start over behind the place.

    text: int32 [B, S]; last: int32 [B]; places: int32 [B, M], below `last` for matches.
    """
    period = jnp.maximum(last[:, None] - places, 1)
    steps = jnp.arange(depth, dtype=jnp.int32)[:, None, None] % period[None]
    index = jnp.minimum(places[None] + 1 + steps, last[None, :, None])
    take = lambda index: jnp.take_along_axis(text, index, axis=1)
    return jax.vmap(take)(index)


def candidates(following: jax.Array, lengths: jax.Array, longest: int) -> Candidates:
    """What the matches say at each depth, best first, [B, depth, M].

    following: int32 [depth, B, M], the tokens that followed each match; lengths: int32 [B, M], 0 for no match.
    """

    def at_depth(agrees: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Candidates]:
        depth, tokens = given
        length = jnp.minimum(lengths + jnp.where(agrees, depth, 0), longest).astype(jnp.float32)
        weights = jnp.where(lengths > 0, SURER**length, 0.0)
        log_probs, ids = _ranked(tokens, weights)
        return agrees & (tokens == ids[:, :1]), Candidates(log_probs, ids)

    depths = jnp.arange(len(following), dtype=jnp.int32)
    _, found = lax.scan(at_depth, lengths > 0, (depths, following))
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), found)


def _ranked(tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the different tokens int32 [B, M] and they themselves, best first, -inf past the last one;
    weights: float32 [B, M], 0 for what is no match
    """
    same = tokens[:, :, None] == tokens[:, None, :]
    mass = jnp.where(same, weights[:, None, :], 0.0).sum(2)
    before = jnp.tril(jnp.ones(same.shape[1:], bool), -1)[None]
    repeats = (same & before & (weights > 0)[:, None, :]).any(2)
    share = mass / (weights.sum(1, keepdims=True) + 1.0)
    scores = jnp.where(repeats | (weights <= 0), -jnp.inf, jnp.log(share))
    best, order = lax.top_k(scores, tokens.shape[1])
    return best, jnp.take_along_axis(tokens, order, axis=1)


def _first(found: Candidates, count: int) -> Candidates:
    """The first `count` of each depth, with places without a candidate where there are fewer"""
    missing = ((0, 0), (0, 0), (0, max(count - found.ids.shape[2], 0)))
    log_probs = jnp.pad(found.log_probs, missing, constant_values=-jnp.inf)
    return Candidates(log_probs[:, :, :count], jnp.pad(found.ids, missing)[:, :, :count])
