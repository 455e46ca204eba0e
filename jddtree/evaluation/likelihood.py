"""Teacher-forced log-probabilities: how probable the target finds a text that is given, token by token.

Contract: a text is scored in chunks of one size through the target and its cache, as a prompt is; one function is
compiled per `Scorer`, whatever the lengths. `decoding/engine` stays the only module that compiles for generation; this
one is for evaluation. Log-probabilities are natural, float32, of the whole softmax.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.models.cache import append_rows
from jddtree.models.parameters import Tree
from jddtree.models.target import Rows, Target
from jddtree.parallel.mesh import AXIS
from pallas_kernels.tree_attention import causal_words

CHUNK = 128


class TokenScores(NamedTuple):
    """What the target says at every place of a text of T tokens; entry i is about token i + 1, given those before it.

    log_probs float32 [T-1] of the text's own tokens; best int32 [T-1], the most probable ids; best_log_probs float32
    [T-1] of those; margins float32 [T-1], the largest logit minus the second.
    """

    log_probs: np.ndarray
    best: np.ndarray
    best_log_probs: np.ndarray
    margins: np.ndarray


class Scorer:
    """A compiled scorer of texts of up to `context` tokens."""

    def __init__(self, model: Model, context: int, chunk: int = CHUNK, kernels: str | None = None):
        """Compile. Raises UserError for a context that the target does not take."""
        most = model.target.max_position_embeddings
        if not 2 <= context <= most or chunk < 1:
            raise UserError(f"the context to score is {context} tokens, but this target takes 2 to {most}")
        self.context, self.chunk, self.vocabulary = context, chunk, model.target.vocab_size
        self._weights = model.weights["target"]
        replicated = None if model.mesh is None else NamedSharding(model.mesh, P())
        shape = (model.target.num_hidden_layers, 1, context, model.target.latent_size)
        self._cache = jax.device_put(np.zeros(shape, model.dtype), replicated)
        tokens = np.zeros((1, chunk), np.int32)
        call = partial(_score_chunk, model, kernels)
        if model.mesh is not None:
            specs = jax.tree.map(lambda array: array.sharding.spec, self._weights)
            call = jax.shard_map(
                call, mesh=model.mesh, in_specs=(specs, *[P()] * 4), out_specs=P(), check_vma=False
            )  # fmt: skip
        arguments = (self._weights, self._cache, tokens, tokens, np.zeros((2, 1), np.int32))
        self._call = jax.jit(call, donate_argnums=1).lower(*arguments).compile()

    def score(self, tokens: Sequence[int]) -> TokenScores:
        """Score a text given as token ids.

        Raises UserError when it has fewer than 2 tokens or more than the context, for an id that the target does not
        have, and when a log-probability is not finite.
        """
        if not 2 <= len(tokens) <= self.context:
            raise UserError(f"the text to score has {len(tokens)} tokens, but 2 to {self.context} fit")
        if bad := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise UserError(
                f"the text to score holds token id {bad[0]}, but this target's are 0 to {self.vocabulary - 1}"
            )
        parts = [self._chunk(*chunk) for chunk in self._chunks(tokens)]
        floats = np.concatenate([part for part, _ in parts], axis=1)
        if not np.isfinite(floats).all():
            raise UserError("the target's log-probabilities are not finite; check the checkpoint (run.py inspect)")
        return TokenScores(floats[0], np.concatenate([best for _, best in parts]), floats[1], floats[2])

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
        """Inputs and targets int32 [1, chunk], tokens before the chunk, and how many of it count"""
        ids = np.asarray(tokens, np.int32)
        for begin in range(0, len(ids) - 1, self.chunk):
            count = min(self.chunk, len(ids) - 1 - begin)
            inputs, targets = np.zeros((2, 1, self.chunk), np.int32)
            inputs[0, :count], targets[0, :count] = ids[begin : begin + count], ids[begin + 1 : begin + 1 + count]
            yield inputs, targets, begin, count

    def _chunk(self, inputs: np.ndarray, targets: np.ndarray, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        bounds = np.array([[begin], [count]], np.int32)
        self._cache, floats, best = self._call(self._weights, self._cache, inputs, targets, bounds)
        return np.asarray(floats)[:, :count], np.asarray(best)[:count]


def _score_chunk(
    model: Model,
    kernels: str | None,
    weights: Tree,
    cache: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    bounds: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cache with the chunk; log-probability of targets and best ids, and margins float32 [3, chunk]; best ids"""
    begin, count = bounds
    target = Target(model.target, weights, (), kernels, AXIS if model.mesh else None)
    offset = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
    valid = offset < count[:, None]
    scored = target(inputs, Rows(begin[:, None] + offset, valid, causal_words(valid), begin), cache)
    logits = target.vocabulary.gather(target.logits(scored.hidden))[0]
    (first, second), (best, _) = (part.T for part in jax.lax.top_k(logits, 2))
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[0][:, None], axis=1)[:, 0]
    return (
        append_rows(cache, scored.latents, begin, count),
        jnp.stack([chosen - total, first - total, first - second]),
        best,
    )
