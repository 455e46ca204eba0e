"""How the engine has XLA compile its programs on this machine."""

import os

import jax

from jddtree.models.kernels import one_graph
from pallas_kernels.common.device import JAX_VERSION

# What a CUDA graph holds: loops, too, so that all layers are one graph.
LOOPS_TOO = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"


def compiler_options(rows: int | None = None) -> dict[str, str | bool]:
    """Options for `jax.stages.Lowered.compile`; rows: of a verify pass on one device, None on several."""
    if jax.default_backend() != "gpu":
        # On a CPU LLVM's higher levels compile a third longer and run no faster.
        return {"xla_backend_optimization_level": "1"}
    # Kernels of a CUDA graph that do not wait for one another overlap: 3 to 6 % of a step.
    options: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    chosen_by_user = COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "")
    if rows is not None and one_graph(rows) and JAX_VERSION >= (0, 11) and not chosen_by_user:
        # One graph for all layers instead of one for each: 5 % of a pass of one row, slower for many.
        options |= {COMMAND_BUFFERS: LOOPS_TOO, "xla_gpu_command_buffer_unroll_loops": True}
    return options
