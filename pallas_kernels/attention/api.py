"""Attention of tree rows over the latent cache and the tree itself (MLA in absorbed form).

Contract of `tree_attention`:
    queries    [B, C, heads, D + R]   D latent values and R rotated ones per head, in the compute dtype
    cache      [layers, B, S, D + R]  committed tokens; what is at `lengths` and beyond may hold NaN
    layer      int32                  which layer of the cache is read; the stack is read in place
    lengths    int32 [B]              committed tokens, read on the device
    rows       [B, C, D + R]          the tree's own latents; rows that nobody sees may hold NaN. Or those
                                      of all layers [layers, B, P, D + R] with P >= C, read in place: zeros
                                      where they are padding; P is best `padded_rows` of C
    ancestors  uint32 [B, C, ceil(C / 32)]  bit j of row i: row i sees row j; its own bit included
    result     [B, C, heads, D]       in the dtype of `queries`; a row that sees nothing gives 0
Every row sees the whole committed prefix and its ancestors; keys are [D + R], values their first D entries. A
chunk of a prompt is the tree in which every row sees the rows before it. A row without any bit is padding and
sees the prefix neither. Scores and sums are float32, and results repeat bit for bit.

implementation: "mosaic" is the Hopper kernel (jax 0.11, bfloat16, D = 512, R = 64, S a multiple of 8),
"triton" the portable one (powers of two, D >= 32, R >= 16). "auto" on a GPU is "mosaic" on Hopper where it
fits, else "triton", but "xla" for float32.
query_bits: those of the ancestors (`ancestor_bits`), for callers that make them once for all layers.

ValueError: an unknown implementation, or operands that do not fit together or the named one, with both
values.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.ancestor_bits import TREE_TILE, causal_words, visible
from pallas_kernels.attention.launch import attention_launch
from pallas_kernels.attention.triton import tree_attention_triton
from pallas_kernels.attention.xla import KEY_BLOCK, tree_attention_xla
from pallas_kernels.common.choice import choose, on_gpu
from pallas_kernels.common.device import gpu_generation, mosaic_supported

__all__ = ["KEY_BLOCK", "causal_words", "mosaic_misfit", "padded_rows", "tree_attention", "visible"]

INTERPRETED_MULTIPROCESSORS = 6


def tree_attention(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    *,
    latent_size: int,
    scale: float,
    implementation: str = "auto",
    query_bits: jax.Array | None = None,
) -> jax.Array:
    """Attend as the module says. scale: positive, of the scores."""
    _check(queries, cache, lengths, rows, ancestors, latent_size, scale)
    layer = jnp.asarray(layer, jnp.int32)
    sizes: dict[str, Any] = {"latent_size": latent_size, "scale": scale}
    chosen = choose(implementation, lambda: _best(queries, cache, latent_size))
    if rows.ndim == 4 and chosen != "mosaic":
        rows = lax.dynamic_index_in_dim(rows, layer, keepdims=False)[:, : queries.shape[1]]
    operands = queries, cache, layer, lengths, rows, ancestors
    if chosen == "xla":
        return tree_attention_xla(*operands, **sizes)
    interpret = not on_gpu()
    batch, count, heads, _ = queries.shape
    launch = attention_launch(batch * count * heads)
    if interpret:  # programs run one by one, idle ones too
        launch = replace(launch, multiprocessors=INTERPRETED_MULTIPROCESSORS)
    if chosen == "triton":
        return tree_attention_triton(*operands, **sizes, launch=launch, interpret=interpret)
    if not mosaic_supported():
        raise ValueError(f"implementation 'mosaic' needs jax 0.11 or later, this is {jax.__version__}")
    # Imported on use: jax's Mosaic modules need absl, which jax does not declare.
    from pallas_kernels.attention.mosaic import interpreter, tree_attention_mosaic

    interpreted = interpreter() if interpret else None
    return tree_attention_mosaic(
        *operands, **sizes, launch=launch, query_bits=query_bits, interpret=interpreted
    )


def padded_rows(count: int) -> int:
    """How many places the own rows of a tree of `count` rows should have,
    so that no kernel has to pad them.
    """
    return -(-count // TREE_TILE) * TREE_TILE


def mosaic_misfit(dtype: jnp.dtype, latent_size: int, width: int, capacity: int) -> str | None:
    """Why the Mosaic kernel does not take such operands on this machine, None if it does. width: of a latent,
    rotated part included; capacity: keys of the cache.
    """
    if not mosaic_supported():
        return f"needs jax 0.11 or later, this is {jax.__version__}"
    if gpu_generation() != "sm_90":
        return f"needs a Hopper GPU (sm_90), this is {gpu_generation()}"
    try:
        from pallas_kernels.attention.mosaic import unsupported
    except ModuleNotFoundError as error:
        return f"needs the package {error.name}"
    return unsupported(dtype, latent_size, width, capacity)


def _best(queries: jax.Array, cache: jax.Array, latent_size: int) -> str:
    """The implementation for these operands on a GPU"""
    if queries.dtype == jnp.float32:
        return "xla"
    misfit = mosaic_misfit(queries.dtype, latent_size, queries.shape[-1], cache.shape[2])
    return "mosaic" if misfit is None else "triton"


def _check(
    queries: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    latent_size: int,
    scale: float,
) -> None:
    dtype = queries.dtype
    if queries.ndim != 4 or dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"queries must be float32 or bfloat16 [B, C, heads, D + R], got {dtype} {queries.shape}"
        )
    batch, count, _, width = queries.shape
    if cache.ndim != 4 or (cache.shape[1], cache.shape[3], cache.dtype) != (batch, width, dtype):
        wanted = f"{dtype} [layers, {batch}, S, {width}] beside queries {queries.shape}"
        raise ValueError(f"cache must be {wanted}, got {cache.dtype} {cache.shape}")
    for name, array, shape, kind in (
        ("lengths", lengths, (batch,), jnp.dtype(jnp.int32)),
        ("rows", rows, _rows_shape(rows, cache, batch, count, width), dtype),
        ("ancestors", ancestors, (batch, count, -(-count // 32)), jnp.dtype(jnp.uint32)),
    ):
        if array.shape != shape or array.dtype != kind:
            wanted = f"{kind} {shape} beside queries {queries.shape}"
            raise ValueError(f"{name} must be {wanted}, got {array.dtype} {array.shape}")
    if not 0 < latent_size < width or not scale > 0:
        raise ValueError(
            f"latent_size must be in 1..{width - 1} and scale positive, got {latent_size} and {scale}"
        )


def _rows_shape(rows: jax.Array, cache: jax.Array, batch: int, count: int, width: int) -> tuple[int, ...]:
    """What the shape of `rows` must be"""
    if rows.ndim == 4:
        return (cache.shape[0], batch, max(count, rows.shape[2]), width)
    return (batch, count, width)
