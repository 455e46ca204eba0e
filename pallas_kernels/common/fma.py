"""a * b + c rounded once, inside a Triton kernel: XLA's Triton does not contract it, and the interpreter has
no inline PTX.
"""

import jax
from jax.experimental.pallas import triton as plt


def fma(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """a * b + c, float32, inside a Triton kernel."""
    if interpret:
        return a * b + c
    out = [jax.ShapeDtypeStruct(a.shape, a.dtype)]
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=out
    )[0]
