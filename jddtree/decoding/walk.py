"""Follow the target's choices down a tree (DDTree, arXiv 2604.12989: verification by match).

The target has chosen one token at every row. From the root, while some child holds the chosen token, the walk
moves to it. Every emitted token is therefore the target's own choice after the tokens before it, at any
temperature.

No step waits for another: a row lies on the walk's path if it and all its ancestors hold what was chosen at
their parents. Siblings hold different tokens, as the candidates of one slot do, so no two such rows have one
depth.
"""

import jax
import jax.numpy as jnp

from jddtree.decoding.tree import Tree
from pallas_kernels.attention.ancestor_bits import pack


def walk(tree: Tree, choices: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the accepted path int32 [B, block] of rows (root first, then 0 past its end) and its length
    int32 [B].

    choices: int32 [B, C], the target's token after each row; block: most rows a path can have, the root
    included.
    """
    row = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    wanted = jnp.take_along_axis(choices, jnp.maximum(tree.parents, 0), axis=1)
    matched = tree.valid & ((row == 0) | (tree.tokens == wanted))
    strayed = tree.ancestors & ~pack(matched)[:, None]
    on_path = matched & (strayed == 0).all(-1)
    depth = jnp.arange(block, dtype=jnp.int32)[None, :, None]
    here = on_path[:, None] & (tree.depths[:, None] == depth)
    path = jnp.where(here, row[:, None], 0).max(-1)
    return path, jnp.where(on_path, tree.depths + 1, 0).max(-1)
