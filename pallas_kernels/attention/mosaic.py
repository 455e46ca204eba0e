"""Tree attention by a Mosaic GPU kernel (Hopper): partial results of every split of the keys, then the merge.

  operands   cache flattened to [.., 576], so that layer and sequence are a row offset of the TMA copies and
             the stack is read in place; queries and rows as well, padded, zeros for rows that are padding;
             ancestor bits by query row (the same in every layer: XLA moves them out of a layer loop)
  split      mosaic_split.py -> sums float32 [splits, tiles, 512, N] not yet divided, maximum
             and total float32 [splits, tiles, 64] in units of log2; splits without work stay unwritten
  merge      merge.py (Pallas-Triton)
Needs jax 0.11, bfloat16, 512 latent and 64 rotated values and a cache of 64 keys or more, a multiple of 8;
ValueError otherwise.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import ancestor_bits as tree_attention_words
from pallas_kernels.attention import refs
from pallas_kernels.attention.ancestor_bits import TREE_TILE, visible
from pallas_kernels.attention.launch import AttentionLaunch, splits, tile_rows
from pallas_kernels.attention.merge import Partials, merge
from pallas_kernels.attention.mosaic_split import split_kernel
from pallas_kernels.attention.partition import Partition

TILING_ROWS = 8  # a TMA copy into tiled shared memory starts at a multiple of this


def unsupported(dtype: jnp.dtype, latent_size: int, width: int, capacity: int) -> str | None:
    """Why these operands do not fit the kernel, None if they do."""
    wanted_width = refs.LATENT + refs.ROTATED
    sizes_fit = latent_size == refs.LATENT and width == wanted_width
    capacity_fits = capacity >= refs.KEYS and capacity % TILING_ROWS == 0
    if dtype == jnp.bfloat16 and sizes_fit and capacity_fits:
        return None
    wanted = f"{jnp.dtype(jnp.bfloat16)}, {refs.LATENT} latent of {wanted_width} values"
    wanted = f"{wanted} and {refs.KEYS} keys or more, a multiple of {TILING_ROWS}"
    return f"needs {wanted}, got {dtype}, {latent_size} latent of {width} values and {capacity} keys"


def tree_attention_mosaic(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    ancestors: jax.Array,
    *,
    latent_size: int,
    scale: float,
    launch: AttentionLaunch,
    query_bits: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """As `tree_attention` of api.py. interpret:
    plgpu.InterpretGPUParams to run on the CPU, None for a GPU.
    """
    if reason := unsupported(queries.dtype, latent_size, queries.shape[-1], cache.shape[2]):
        raise ValueError(f"implementation 'mosaic' {reason}")
    bits = tree_attention_words.query_bits(ancestors, queries.shape[2]) if query_bits is None else query_bits
    places = bits.shape[1] // 2 * TREE_TILE
    stacked = rows.ndim == 4
    if not stacked or rows.shape[2] != places:
        if stacked:
            rows = lax.dynamic_index_in_dim(rows, layer, keepdims=False)[:, : queries.shape[1]]
        rows = _padded(_without_padding(rows, ancestors), places)[None]
    partials = _split_attention(queries, cache, layer, lengths, rows, bits, scale, launch, interpret)
    return merge(partials, lengths, ancestors, queries, launch.merge, interpret is not None)


def _split_attention(
    queries: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    query_bits: jax.Array,
    scale: float,
    launch: AttentionLaunch,
    interpret: Any,
) -> Partials:
    """What every split contributes. rows: whole tree tiles of all layers or, on an axis of 1, of this one;
    zeros where they are padding
    """
    shape = _shape(queries, cache, scale, launch, rows.shape[0] > 1, interpret is not None)
    count = shape.partition.splits
    programs = shape.sequences * shape.tiles
    sums = jax.ShapeDtypeStruct((count, programs, refs.LATENT, shape.rows_per_tile), jnp.float32)
    per_row = jax.ShapeDtypeStruct((count, programs, refs.ROWS), jnp.float32)
    call = plgpu.kernel(
        functools.partial(split_kernel, shape=shape),
        out_type=(sums, per_row, per_row),
        scratch_types=refs.scratch(),
        grid=(count, programs),
        grid_names=("split", "tile"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )
    width = queries.shape[-1]
    partial_sums, maximum, total = call(
        _padded(queries.reshape(shape.sequences, -1, width), shape.query_rows).reshape(-1, width),
        cache.reshape(-1, width),
        rows.reshape(-1, width),
        layer.reshape(1),
        lengths,
        query_bits,
    )
    return Partials(partial_sums, maximum, total, shape.partition, shape.rows_per_tile, rows_last=True)


def _shape(
    queries: jax.Array,
    cache: jax.Array,
    scale: float,
    launch: AttentionLaunch,
    stacked: bool,
    interpret: bool,
) -> refs.Shape:
    sequences, tree_rows, heads, _ = queries.shape
    rows_per_tile = tile_rows(tree_rows * heads, refs.ROWS)
    tiles = math.ceil(tree_rows * heads / rows_per_tile)
    return refs.Shape(
        partition=Partition(
            keys=refs.KEYS,
            tree_blocks=math.ceil(tree_rows / refs.KEYS),
            splits=splits(sequences * tiles, launch.multiprocessors),
            min_blocks=launch.min_blocks,
        ),
        query_rows=math.ceil(tree_rows * heads / TILING_ROWS) * TILING_ROWS,
        tiles=tiles,
        rows_per_tile=rows_per_tile,
        sequences=sequences,
        capacity=cache.shape[2],
        factor=scale * math.log2(math.e),
        stacked=stacked,
        interpret=interpret,
    )


def _padded(array: jax.Array, rows: int) -> jax.Array:
    """[B, n, width] with n padded to `rows`."""
    return jnp.pad(array, ((0, 0), (0, rows - array.shape[1]), (0, 0)))


def _without_padding(rows: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Zeros for the rows that are padding, which may be NaN."""
    live = jnp.diagonal(visible(ancestors, rows.shape[1]), axis1=1, axis2=2)
    return jnp.where(live[:, :, None], rows, jnp.zeros((), rows.dtype))


def interpreter(**options: Any) -> Any:
    """Parameters for running the split kernel on the CPU."""
    return plgpu.InterpretGPUParams(**options)  # type: ignore[attr-defined]  # 0.10 has none
