"""What this process's GPU is, and what this jax can do with it.

gpu_generation         the generation whose launch tables are used
MULTIPROCESSORS        of the cards that the tables are for, by generation
SHARED_BYTES           shared memory that one program may have, by generation
mosaic_supported       whether plgpu.kernel has the form that the Mosaic kernels use
overlap_supported      whether a kernel may let the next one begin early (`dependent_launch`)
"""

import functools

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
GENERATIONS = ("sm_80", "sm_90", "sm_100", "sm_120")
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 188}
SHARED_BYTES = {"sm_80": 160 * 1024, "sm_90": 220 * 1024, "sm_100": 220 * 1024, "sm_120": 96 * 1024}
DEFAULT = "sm_90"  # what is lowered for on a machine without a GPU
OVERLAPPING = ("sm_90", "sm_100", "sm_120")  # have programmatic dependent launch


@functools.cache
def gpu_generation() -> str:
    """The generation of this process's first device, else the newest older one; `DEFAULT` without a GPU.

    Raises ValueError below sm_80, which has no bfloat16 tensor cores.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return DEFAULT
    major, minor = (int(part) for part in str(device.compute_capability).split("."))
    known = [name for name in GENERATIONS if int(name.removeprefix("sm_")) <= 10 * major + minor]
    if not known:
        raise ValueError(
            f"compute capability {major}.{minor} is below 8.0: the expert kernels need bfloat16 tensor cores"
        )
    return known[-1]


def mosaic_supported() -> bool:
    """Whether this jax has the form of plgpu.kernel that the Mosaic kernels use: 0.11 and later."""
    return JAX_VERSION >= (0, 11)


def overlap_supported() -> bool:
    """Whether kernels may let the next one begin early: from jax 0.11 and sm_90 on."""
    return JAX_VERSION >= (0, 11) and gpu_generation() in OVERLAPPING
