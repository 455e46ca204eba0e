"""Lowering for a GPU: on a machine without one, and without jax's warnings.

cuda_target   context that describes a GPU to a lowering on a machine without one (needed from jax 0.11 on)
quiet_triton  context for lowering: from 0.11 on jax warns whenever a Pallas-Triton kernel is lowered
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels.common.device import JAX_VERSION, MULTIPROCESSORS

TRITON_TARGET = "__gpu$xla.gpu.triton"  # of the custom calls that kernels are lowered to
MOSAIC_TARGET = "mosaic_gpu_v2"


@contextlib.contextmanager
def quiet_triton() -> Iterator[None]:
    """Lower and compile Pallas-Triton kernels without the deprecation warning of jax 0.11 and later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def cuda_target(
    kind: str = "NVIDIA H200", cores: int = MULTIPROCESSORS["sm_90"]
) -> contextlib.AbstractContextManager[Any]:
    """Lower for this GPU on a machine without one."""
    if JAX_VERSION < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(kind, cores, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))
