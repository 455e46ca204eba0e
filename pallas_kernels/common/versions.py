"""What differs between the supported jax versions (0.10.2 to 0.12), or between a GPU and the interpreter.

triton_call       pl.pallas_call on the Triton backend, which the type of compiler_params selects in every version
fma               a * b + c rounded once; XLA's Triton does not contract it, and the interpreter has no inline PTX
quiet_triton      context for lowering: from 0.11 on jax warns whenever a Pallas-Triton kernel is lowered
compiler_options  what to compile a program with on this machine
mosaic_supported  whether plgpu.kernel has the form that the Mosaic kernels use
cuda_target       context that describes a GPU to a lowering on a machine without one (needed from 0.11 on)
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.dependent_launch import launch_dependents
from pallas_kernels.experts.launch import gpu_generation

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
EARLY_LAUNCH = ("sm_90", "sm_100", "sm_120")  # GPU generations that have programmatic dependent launch
LOOPS_TOO = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
TRITON_TARGET = "__gpu$xla.gpu.triton"
MOSAIC_TARGET = "mosaic_gpu_v2"


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    warps: int,
    stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
    early: bool = False,
) -> Callable[..., Any]:
    """The kernel as a function of arrays; it gets each of them, and its output or outputs, whole.

    aliases: an operand's number to that of the output that takes its place in memory. early: only kernels of this
    package read the results, so that the next one may be launched before this one ends (`early_launch`)."""
    early = early and not interpret and JAX_VERSION >= (0, 11) and gpu_generation() in EARLY_LAUNCH

    def whole(*refs: Any) -> None:
        if early:
            launch_dependents()
        kernel(*refs, interpret=interpret)

    def call(*operands: jax.Array) -> Any:
        return pl.pallas_call(
            whole,
            grid=grid,
            in_specs=[pl.no_block_spec] * len(operands),
            out_specs=pl.no_block_spec if isinstance(out, jax.ShapeDtypeStruct) else (pl.no_block_spec,) * len(out),
            out_shape=out,
            input_output_aliases=dict(aliases or {}),
            interpret=interpret,
            name=name,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        )(*operands)

    return call


def fma(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """a * b + c, float32, inside a Triton kernel."""
    if interpret:
        return a * b + c
    out = [jax.ShapeDtypeStruct(a.shape, a.dtype)]
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=out
    )[0]


@contextlib.contextmanager
def quiet_triton() -> Iterator[None]:
    """Lower and compile Pallas-Triton kernels without the deprecation warning of jax 0.11 and later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def compiler_options(rows: int | None = None) -> dict[str, str | bool]:
    """Options for `jax.stages.Lowered.compile`; rows: of a verify pass on one device, None on several."""
    if jax.default_backend() == "gpu":
        # Kernels of a CUDA graph that do not wait for one another overlap: 3 to 6 % of a step.
        options: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
        chosen = "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", "")  # by who runs this
        if rows == 1 and JAX_VERSION >= (0, 11) and not chosen:
            # One graph for all layers instead of one for each: 5 % of a pass of one row, slower for many.
            options |= {"xla_gpu_enable_command_buffer": LOOPS_TOO, "xla_gpu_command_buffer_unroll_loops": True}
        return options
    # On a CPU LLVM's higher levels compile a third longer and run no faster.
    return {"xla_backend_optimization_level": "1"}


def mosaic_supported() -> bool:
    return JAX_VERSION >= (0, 11)


def cuda_target(kind: str = "NVIDIA H200", cores: int = 132) -> contextlib.AbstractContextManager[Any]:
    """Lower for this GPU on a machine without one."""
    if JAX_VERSION < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(kind, cores, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))
