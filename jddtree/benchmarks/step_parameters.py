"""Random parameters of one rank on a device, or of all ranks on a mesh: 76 GB of K2.6 a rank without a host copy.

Shapes are those that `parallel.partition.on_mesh` gives a mesh, divided by its ranks. On a mesh every device makes its
own slice, and all make the same numbers where they hold the same. Every INT4 code is equally likely; scales and dense
weights are such that a layer keeps the size of its input, so that activations stay finite and logits differ. A part of
an array is made at a time and written in place, so that little more than the arrays is needed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from converters.dflash import drafter_parameters
from jddtree.benchmarks.step_presets import Models
from jddtree.models.parameters import Parameter, Tree, nest, target_parameters
from jddtree.parallel.mesh import AXIS
from jddtree.parallel.partition import on_mesh, spec

CODE_DEVIATION = 4.61  # of an INT4 code that is uniform in 0..15
COMPILING = 8  # threads
Tables = dict[str, dict[str, Parameter]]


class Kind(NamedTuple):
    """What is compiled to make an array. shape: of a rank; values: "words" of bits, "scales" (two bfloat16 in a word,
    from 0.5 to 1.5 times the scale), "normal", or "constant" (the scale itself); spec: over a mesh.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    values: str
    spec: P = P()


def rank_tables(models: Models, world: int) -> Tables:
    """The parameter tables "target" and "drafter" with the shapes of one of `world` ranks."""
    return {part: _of_rank(table, world) for part, table in _tables(models, world, "tensor").items()}


def random_weights(
    models: Models, world: int, dtype: jnp.dtype, seed: int, mesh: Mesh | None = None, layout: str = "tensor"
) -> Tree:
    """The weights of one of `world` ranks, {"target": tree, "drafter": tree}, or those of all ranks on a mesh."""
    tables, key = _tables(models, world, layout), jax.random.key(seed)
    ranks = {part: _of_rank(table, world) for part, table in tables.items()}
    kinds, scales = {}, {}
    for part, table in (ranks if mesh is None else tables).items():
        for path, parameter in table.items():
            values, scales[part, path] = _recipe(path, parameter)
            place = P() if mesh is None else spec(parameter)
            kinds[part, path] = Kind(ranks[part][path].shape, _dtype(parameter, dtype), values, place)
    with ThreadPoolExecutor(COMPILING) as pool:
        compiled = lambda kind: _fill.lower(key, jnp.float32(0), kind, mesh).compile()
        distinct = set(kinds.values())
        made = dict(zip(distinct, pool.map(compiled, distinct), strict=True))
    weights: dict[str, Tree] = {part: {} for part in tables}
    for number, ((part, path), kind) in enumerate(kinds.items()):
        weights[part][path] = made[kind](jax.random.fold_in(key, number), jnp.float32(scales[part, path]))
    return jax.block_until_ready({part: nest(arrays) for part, arrays in weights.items()})


def random_array(key: jax.Array, kind: Kind, mesh: Mesh | None = None) -> jax.Array:
    """Values of a kind, made part by part."""
    return _fill(key, jnp.float32(1.0), kind, mesh)


def nbytes(parameter: Parameter, dtype: jnp.dtype) -> int:
    """Bytes of a parameter's array."""
    return int(np.prod(parameter.shape)) * _dtype(parameter, dtype).itemsize


def _tables(models: Models, world: int, layout: str) -> Tables:
    layers = models.target.num_moe_layers
    tables = {"target": target_parameters(models.target), "drafter": drafter_parameters(models.drafter)}
    return {part: on_mesh(table, world, layout, layers) for part, table in tables.items()}


def _of_rank(table: dict[str, Parameter], world: int) -> dict[str, Parameter]:
    def of_rank(parameter: Parameter) -> Parameter:
        shape = list(parameter.shape)
        if parameter.split is not None:
            shape[parameter.split] //= world
        return replace(parameter, shape=tuple(shape))

    return {path: of_rank(parameter) for path, parameter in table.items()}


def _dtype(parameter: Parameter, dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(dtype if parameter.dtype == "compute" else parameter.dtype)


def _recipe(path: str, parameter: Parameter) -> tuple[str, float]:
    """Values, as in `Kind`, and their scale"""
    shape, name = parameter.shape, path.rsplit(".", 1)[-1]
    if name == "embed":
        return "normal", 1.0
    if name.endswith("_scale"):
        columns = shape[-2] * 32 if name.startswith("gate_up") else shape[-2] * 64
        return "scales", columns**-0.5 / CODE_DEVIATION
    if name.endswith(("norm", "bias")):
        return "constant", 1.0 if name.endswith("norm") else 0.0
    return "words" if parameter.dtype == "int32" else "normal", shape[-1] ** -0.5


@partial(jax.jit, static_argnums=(2, 3))
def _fill(key: jax.Array, scale: jax.Array, kind: Kind, mesh: Mesh | None) -> jax.Array:
    """The array of one device, or that of a mesh, whose slices differ where it is split"""
    if mesh is None:
        return _filled(key, scale, kind)

    def of_rank(key: jax.Array, scale: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, lax.axis_index(AXIS)) if AXIS in kind.spec else key
        return _filled(own, scale, kind)

    return jax.shard_map(of_rank, mesh=mesh, in_specs=P(), out_specs=kind.spec, check_vma=False)(key, scale)


def _filled(key: jax.Array, scale: jax.Array, kind: Kind) -> jax.Array:
    """Stacks of layers, and of experts by the layer, are filled layer by layer"""
    shape = kind.shape
    if kind.values == "constant":
        return jnp.broadcast_to(scale.astype(kind.dtype), shape)
    parts = next(count for count in (64, 61, 60, 32, 16, 8, 6, 5, 4, 3, 2, 1) if shape[0] % count == 0)
    size = (shape[0] // parts, *shape[1:])

    def part(key: jax.Array) -> jax.Array:
        if kind.values == "words":
            return lax.bitcast_convert_type(jax.random.bits(key, size, jnp.uint32), jnp.int32)
        if kind.values == "scales":
            values = (jax.random.uniform(key, (*size, 2)) + 0.5) * scale
            return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.int32)
        return (jax.random.normal(key, size) * scale).astype(kind.dtype)

    def write(index: jax.Array, array: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, part(jax.random.fold_in(key, index)), index * size[0], 0)

    return lax.fori_loop(0, parts, write, jnp.zeros(shape, kind.dtype))
