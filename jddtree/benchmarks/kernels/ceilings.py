"""What this card reaches on random data: copying, reading, and a bfloat16 matmul."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.kernels.roofline import Ceilings
from jddtree.results import Row

COPIED = 2**29  # 32-bit words
READ = 176_000_000
MATMUL = 8192
Clock = Callable[[Callable[..., jax.Array], tuple[jax.Array, ...]], float]


def by_kernels(compiled: Callable[..., jax.Array], arguments: tuple[jax.Array, ...]) -> float:
    """Microseconds of a call, by CUPTI."""
    return timing.measure(compiled, [arguments]).total_us


def measure(key: jax.Array, time: Clock = by_kernels) -> tuple[Ceilings, list[Row]]:
    """The ceilings, and the rows of the roofline card that show them. time: microseconds of a compiled
    call.
    """
    words = jax.jit(jax.random.bits, static_argnums=(1, 2))(key, (COPIED,), "uint32")
    copy_us = _time(time, lambda words: words + jnp.uint32(1), words)
    del words
    values = jax.jit(jax.random.normal, static_argnums=1)(key, (READ,))
    read_us = _time(time, jnp.sum, values)
    del values
    operands = (_matrix(one) for one in jax.random.split(key))
    matmul_us = _time(time, jnp.matmul, *operands)
    ceilings = Ceilings(
        copy=2 * 4 * COPIED / copy_us * 1e6,
        read=4 * READ / read_us * 1e6,
        matmul=2 * MATMUL**3 / matmul_us * 1e6,
    )
    rows = [
        {"kernel": "copy", "time_us": copy_us, "tb_s": ceilings.copy / 1e12},
        {"kernel": "read", "time_us": read_us, "tb_s": ceilings.read / 1e12},
        {"kernel": "bfloat16_matmul", "time_us": matmul_us, "tflop_s": ceilings.matmul / 1e12},
    ]
    return ceilings, rows


def _time(time: Clock, function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    return time(jax.jit(function).lower(*arguments).compile(), arguments)


def _matrix(key: jax.Array) -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(key, (MATMUL, MATMUL), "bfloat16")
