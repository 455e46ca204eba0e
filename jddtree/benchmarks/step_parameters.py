"""Random parameters of one rank, made on the device: 76 GB of K2.6 without a host copy.

Shapes are those that `parallel.partition.on_mesh` gives a mesh, divided by its ranks. Every INT4 code is equally
likely; scales and dense weights are such that a layer keeps the size of its input, so that activations stay finite and
logits differ. A part of an array is made at a time and written in place, so that little more than the arrays is needed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddtree.benchmarks.step_presets import Models
from jddtree.models.parameters import Parameter, Tree, drafter_parameters, nest, target_parameters
from jddtree.parallel.partition import on_mesh

CODE_DEVIATION = 4.61  # of an INT4 code that is uniform in 0..15
COMPILING = 8  # threads
Recipe = tuple[float, tuple[int, ...], jnp.dtype, str]  # scale, shape, dtype and kind, as `_fill` takes them


def rank_tables(models: Models, world: int) -> dict[str, dict[str, Parameter]]:
    """The parameter tables "target" and "drafter" with the shapes of one of `world` ranks."""
    layers = models.target.num_moe_layers
    tables = {"target": target_parameters(models.target), "drafter": drafter_parameters(models.drafter)}
    return {
        part: {path: _of_rank(parameter, world) for path, parameter in on_mesh(table, world, "tensor", layers).items()}
        for part, table in tables.items()
    }


def random_weights(models: Models, world: int, dtype: jnp.dtype, seed: int) -> Tree:
    """The weights of one rank, {"target": tree, "drafter": tree}."""
    tables = rank_tables(models, world)
    recipes = {
        (part, path): _recipe(path, parameter, dtype)
        for part, table in tables.items()
        for path, parameter in table.items()
    }
    key = jax.random.key(seed)
    with ThreadPoolExecutor(COMPILING) as pool:
        kinds = {recipe[1:] for recipe in recipes.values()}
        made = dict(
            zip(kinds, pool.map(lambda kind: _fill.lower(key, jnp.float32(0), *kind).compile(), kinds), strict=True)
        )
    weights: dict[str, Tree] = {part: {} for part in tables}
    for number, ((part, path), (scale, shape, kept, kind)) in enumerate(recipes.items()):
        weights[part][path] = made[shape, kept, kind](jax.random.fold_in(key, number), jnp.float32(scale))
    return jax.block_until_ready({part: nest(arrays) for part, arrays in weights.items()})


def random_array(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Normal values, made part by part."""
    return _fill(key, jnp.float32(1.0), shape, dtype, "normal")


def nbytes(parameter: Parameter, dtype: jnp.dtype) -> int:
    """Bytes of a parameter's array."""
    return int(np.prod(parameter.shape)) * _dtype(parameter, dtype).itemsize


def _of_rank(parameter: Parameter, world: int) -> Parameter:
    if parameter.split is None:
        return parameter
    shape = list(parameter.shape)
    shape[parameter.split] //= world
    return replace(parameter, shape=tuple(shape))


def _dtype(parameter: Parameter, dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(dtype if parameter.dtype == "compute" else parameter.dtype)


def _recipe(path: str, parameter: Parameter, dtype: jnp.dtype) -> Recipe:
    shape, name = parameter.shape, path.rsplit(".", 1)[-1]
    kind, scale = "words" if parameter.dtype == "int32" else "normal", shape[-1] ** -0.5
    if name == "embed":
        scale = 1.0
    if name.endswith("_scale"):
        columns = shape[2] * 32 if name.startswith("gate_up") else shape[2] * 64
        kind, scale = "scales", columns**-0.5 / CODE_DEVIATION
    if name.endswith(("norm", "bias")):
        kind, scale = "constant", 1.0 if name.endswith("norm") else 0.0
    return scale, shape, _dtype(parameter, dtype), kind


@partial(jax.jit, static_argnums=(2, 3, 4))
def _fill(key: jax.Array, scale: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, kind: str) -> jax.Array:
    """kind: "words" of bits, "scales" (two bfloat16 in a word, from 0.5 to 1.5 times `scale`), "normal", or "constant"
    (`scale` itself). Stacks of layers, and of experts by the layer, are filled layer by layer.
    """
    if kind == "constant":
        return jnp.broadcast_to(scale.astype(dtype), shape)
    parts = next(count for count in (64, 61, 60, 32, 16, 8, 6, 5, 4, 3, 2, 1) if shape[0] % count == 0)
    size = (shape[0] // parts, *shape[1:])

    def part(key: jax.Array) -> jax.Array:
        if kind == "words":
            return lax.bitcast_convert_type(jax.random.bits(key, size, jnp.uint32), jnp.int32)
        if kind == "scales":
            values = (jax.random.uniform(key, (*size, 2)) + 0.5) * scale
            return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.int32)
        return (jax.random.normal(key, size) * scale).astype(dtype)

    def write(index: jax.Array, array: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, part(jax.random.fold_in(key, index)), index * size[0], 0)

    return lax.fori_loop(0, parts, write, jnp.zeros(shape, dtype))
