"""Let the kernel after this one be launched while this one still runs (programmatic dependent launch, CUDA
12, sm_90).

XLA makes every Triton kernel wait at its beginning for the kernels that it depends on, so that a successor
launched early has its launch behind it when this one ends, and nothing else. `launch_dependents` says, inside
a Triton kernel, that the successors may come: about 0.3 us less for each kernel of a chain.

Only for kernels whose results are read by kernels of this package: a model whose sizes do not fit one of them
has no kernels at all. A kernel that XLA makes of jax.numpy may read what it takes for constant before it
waits; XLA sees to that where it lets successors come itself.
"""

from typing import Any

from jax._src import core
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.primitives import barrier_effect

ASSEMBLY = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
LANES = 32  # inline assembly in Triton works on the elements of a tensor

launch_dependents_p = core.Primitive("launch_dependents")
launch_dependents_p.multiple_results = True


def launch_dependents() -> None:
    """The effect keeps jax from dropping the instruction, which has no result."""
    launch_dependents_p.bind()


@launch_dependents_p.def_effectful_abstract_eval
def _abstract() -> tuple[tuple[()], set[Any]]:
    return (), {barrier_effect}


@lowering.register_lowering(launch_dependents_p)
def _lower(context: Any) -> list[Any]:
    kind = ir.RankedTensorType.get((LANES,), ir.IntegerType.get_signless(32))
    lanes = dialect.make_range(kind, 0, LANES)
    dialect.elementwise_inline_asm(
        [kind], ASSEMBLY, constraints="=r,r", pure=False, packed_element=1, args=[lanes]
    )
    return []
