"""Follow the target's choices down a tree (DDTree, arXiv 2604.12989: verification by match).

The target has chosen one token at every row. From the root, while some child holds the chosen token, move to it. Every
emitted token is therefore the target's own choice after the tokens before it, at any temperature.
"""

import jax
import jax.numpy as jnp

from jddtree.decoding.tree import Tree


def walk(tree: Tree, choices: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the accepted path int32 [B, block] of rows (root first, then 0 past its end) and its length int32 [B].

    choices: int32 [B, C], the target's token after each row; block: most rows a path can have, the root included.
    """
    current = jnp.zeros_like(tree.tokens[:, 0])
    going = tree.valid[:, 0]
    path, length = [current], going.astype(jnp.int32)
    for _ in range(block - 1):
        wanted = jnp.take_along_axis(choices, current[:, None], axis=1)
        match = tree.valid & (tree.parents == current[:, None]) & (tree.tokens == wanted)
        going &= match.any(1)
        current = jnp.where(going, jnp.argmax(match, axis=1).astype(current.dtype), current)
        path.append(jnp.where(going, current, 0))
        length += going.astype(jnp.int32)
    return jnp.stack(path, axis=1), length
