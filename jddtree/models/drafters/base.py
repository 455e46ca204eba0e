"""What decoding asks of a drafter, and all that it knows of one.

A drafter keeps a draft state of its own beside the target's cache (`State.draft`): arrays that only it reads. `observe`
brings it up to date whenever tokens are committed, `propose` turns it into candidates for the next tokens. Like the
target's cache it holds committed tokens only, and what lies beyond a sequence's length is never read.

Candidates are factorised: those of a depth are the same whatever was drafted before, and the tree is built from them.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jddtree.drafter_kinds import DrafterConfig
from jddtree.models.parameters import Tree
from jddtree.models.target import Target


class Candidates(NamedTuple):
    """By depth, best first: log_probs float32 and ids int32 [B, block - 1, K]. Those of a depth are different ids; a
    log-probability of -inf marks a place without a candidate, which never enters a tree.
    """

    log_probs: jax.Array
    ids: jax.Array


class Committed(NamedTuple):
    """Rows that were just committed: tokens int32 [B, n], taps [B, n, taps * H] of the target's tapped layers, start
    int32 [B], the position of the first row, and counts int32 [B], how many of them count.
    """

    tokens: jax.Array
    taps: jax.Array
    start: jax.Array
    counts: jax.Array

    @property
    def positions(self) -> jax.Array:
        """Of every row, int32 [B, n]."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]


class Ranking(Protocol):
    """How a round makes candidates of logits; count: K, candidates of each depth."""

    @property
    def count(self) -> int:
        """K."""

    def __call__(self, logits: jax.Array, positions: jax.Array) -> Candidates:
        """The best of logits float32 [B, block - 1, V], or a rank's part of them, for tokens at positions int32
        [B, block - 1].
        """


class Proposer(Protocol):
    """A drafter over its weights, inside a compiled program."""

    def observe(self, draft: Any, committed: Committed) -> Any:
        """The draft state with rows that were committed."""

    def propose(self, draft: Any, root: jax.Array, lengths: jax.Array, ranking: Ranking) -> Candidates:
        """Candidates for the tokens after `root` int32 [B], which stands at position `lengths` int32 [B]."""


class Drafter(Protocol):
    """A kind of drafter, made of its configuration."""

    def __init__(self, config: DrafterConfig): ...

    def shapes(self, sequences: int, context: int, dtype: jnp.dtype, arrays: Tree | None) -> Any:
        """The draft state as `jax.ShapeDtypeStruct`s, for so many sequences of so many tokens.

        dtype: that of caches. arrays: the drafter's weights, where a mesh may have padded them; None is unpadded.
        """

    def specs(self) -> Any:
        """The partition specs of the draft state on a mesh."""

    def over(self, arrays: Tree, target: Target, kernels: str | None) -> Proposer:
        """The drafter over its weights, {} for one without. target: whose embedding, head and axis it may use."""
