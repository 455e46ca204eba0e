"""Random targets made on the devices: the same numbers on every mesh, nothing passes through the host.

A value depends on the seed, its parameter's path and its index alone, by hashing (lowbias32 of Chris Wellons'
"hash prospector"), which is elementwise, so that every device makes its own slice. Weights have variance 1 /
fan-in.
"""

import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jddtree.config import TargetConfig
from jddtree.models.parameters import Parameter, Tree, nest, target_parameters
from jddtree.models.partition import on_mesh, spec

INT4_DEVIATION = math.sqrt((16**2 - 1) / 12)  # of the sixteen values


def random_target(
    config: TargetConfig, dtype: jnp.dtype, mesh: Mesh | None, seed: int, layout: str = "tensor"
) -> Tree:
    """The tree of `target_parameters` in a compute dtype, on the devices of a mesh or on the default
    device.
    """
    table = target_parameters(config)
    placed = table if mesh is None else on_mesh(table, mesh.size, layout, config.num_moe_layers)
    arrays = {}
    for path, parameter in table.items():
        sharding = None if mesh is None else NamedSharding(mesh, spec(placed[path]))
        make = partial(_parameter, path, parameter, placed[path].shape, dtype, config)
        arrays[path] = jax.jit(make, out_shardings=sharding)(jnp.uint32(seed))
    return nest(arrays)


def random_normed(shape: tuple[int, ...], dtype: jnp.dtype, mesh: Mesh | None, seed: int) -> jax.Array:
    """Values of variance 1 on every device of a mesh, or on the default device."""
    sharding = None if mesh is None else NamedSharding(mesh, jax.sharding.PartitionSpec())
    make = lambda seed: _uniform(_bits(shape, seed), 1.0).astype(dtype)
    return jax.jit(make, out_shardings=sharding)(jnp.uint32(seed))


def random_ids(count: int, vocabulary: int, seed: int) -> np.ndarray:
    """Token ids int32 [count] on the host."""
    return np.random.default_rng(seed).integers(0, vocabulary, count, dtype=np.int32)


def _parameter(
    path: str,
    parameter: Parameter,
    placed: tuple[int, ...],
    dtype: jnp.dtype,
    config: TargetConfig,
    seed: jax.Array,
) -> jax.Array:
    """One array: in the shape of `placed`, whose values past the parameter's own are zeros"""
    bits = _bits(parameter.shape, seed ^ jnp.uint32(zlib.crc32(path.encode())))
    values = _values(path, parameter, bits, dtype, config)
    if len(placed) > len(parameter.shape):
        values = values.reshape(placed[0], -1, *parameter.shape[1:])
    return jnp.pad(values, [(0, size - have) for have, size in zip(values.shape, placed, strict=True)])


def _values(
    path: str, parameter: Parameter, bits: jax.Array, dtype: jnp.dtype, config: TargetConfig
) -> jax.Array:
    name = path.split(".")[-1]
    if name.endswith("_scale"):
        fan_in = config.moe_intermediate_size if name.startswith("down") else config.hidden_size
        return _scales(bits, 1 / (INT4_DEVIATION * math.sqrt(fan_in)))
    if parameter.dtype == "int32":
        return lax.bitcast_convert_type(bits, jnp.int32)
    if name.endswith("norm"):
        return jnp.ones(parameter.shape, dtype)
    deviation = {"embed": 1.0, "router_bias": 0.01}.get(name, 1 / math.sqrt(parameter.shape[-1]))
    return _uniform(bits, deviation).astype(jnp.float32 if parameter.dtype == "float32" else dtype)


def _scales(bits: jax.Array, size: float) -> jax.Array:
    """Two bfloat16 a word, from half to one and a half times `size`"""
    halves = (
        _uniform(half, size / math.sqrt(12)) + size for half in (bits << 16, bits & jnp.uint32(0xFFFF0000))
    )
    low, high = (
        lax.bitcast_convert_type(half.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32) for half in halves
    )
    return lax.bitcast_convert_type(low | high << 16, jnp.int32)


def _uniform(bits: jax.Array, deviation: float) -> jax.Array:
    """float32 of mean 0 and this standard deviation"""
    return ((bits >> 8).astype(jnp.float32) * 2.0**-24 - 0.5) * (deviation * math.sqrt(12))


def _bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """uint32 of every index"""
    state = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        state = state ^ lax.broadcasted_iota(jnp.uint32, shape, axis)
        state = (state ^ state >> 16) * jnp.uint32(0x7FEB352D)
        state = (state ^ state >> 15) * jnp.uint32(0x846CA68B)
        state = state ^ state >> 16
    return state
