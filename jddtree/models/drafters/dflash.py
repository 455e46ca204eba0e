"""The DFlash drafter: one pass over a block of masks proposes every slot at once (arXiv 2602.06036, section
3).

Its layers attend to keys and values made from the target's tapped outputs, which are computed once per
committed token and cached. Embedding and head are the target's. This is what decoding sees of it; the network
is `jddtree.models.drafters.dflash_network`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jddtree.config import DFlashConfig
from jddtree.models.cache import append_rows
from jddtree.models.drafters.base import Candidates, Committed, Ranking, TargetEnds
from jddtree.models.parameters import Tree
from jddtree.parallel.mesh import AXIS

if TYPE_CHECKING:
    from jddtree.models.drafters.dflash_network import DFlashModel


class Caches(NamedTuple):
    """The draft state: keys and values of committed tokens, [layers, B, S, key heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


class DFlash:
    """DFlash as a `jddtree.models.drafters.base.Drafter`."""

    def __init__(self, config: DFlashConfig):
        self.config = config

    def shapes(self, sequences: int, context: int, dtype: jnp.dtype, arrays: Tree | None = None) -> Caches:
        """See `Drafter`."""
        config, heads = self.config, self.config.num_key_value_heads
        if arrays is not None:
            heads = arrays["layers"]["k"].shape[1] // config.head_dim
        shape = config.num_hidden_layers, sequences, context, heads, config.head_dim
        cache: Any = jax.ShapeDtypeStruct(shape, dtype)
        return Caches(cache, cache)

    def specs(self) -> Caches:
        """See `Drafter`; split by key heads."""
        split: Any = P(None, None, None, AXIS)
        return Caches(split, split)

    def over(self, arrays: Tree, target: TargetEnds, kernels: str) -> "DFlashProposer":
        """See `Drafter`. Only here is the network needed: programs that were kept run without flax."""
        from jddtree.models.drafters.dflash_network import DFlashModel

        return DFlashProposer(self.config, DFlashModel(self.config, arrays, target.axis, kernels), target)


class DFlashProposer:
    """The network with the target's embedding and head."""

    def __init__(self, config: DFlashConfig, model: "DFlashModel", target: TargetEnds):
        self.config, self.model, self.target = config, model, target

    def observe(self, draft: Caches, committed: Committed) -> Caches:
        """See `Proposer`."""
        keys, values = self.model.context(committed.taps, committed.positions)
        start, counts = committed.start, committed.counts
        return Caches(
            append_rows(draft.keys, keys, start, counts), append_rows(draft.values, values, start, counts)
        )

    def propose(self, draft: Caches, root: jax.Array, lengths: jax.Array, ranking: Ranking) -> Candidates:
        """See `Proposer`."""
        config, target = self.config, self.target
        masks = jnp.full((root.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
        embedded = target.embed(jnp.concatenate([root[:, None], masks], axis=1))
        logits = target.head(self.model(embedded, lengths, draft.keys, draft.values))
        if (cap := config.final_logit_softcapping) is not None:
            logits = target.vocabulary.mask(cap * jnp.tanh(logits / cap))
        positions = lengths[:, None] + jnp.arange(1, config.block_size, dtype=jnp.int32)[None]
        return ranking(logits, positions)
