"""What `bench step` is asked to do, checked before anything is measured."""

from dataclasses import dataclass

import jax.numpy as jnp

from jddtree.benchmarks.kernels.sizes import names, numbers
from jddtree.benchmarks.step.rank import forced_routing as step_routing
from jddtree.benchmarks.step.rank import presets as step_presets
from jddtree.benchmarks.step.rank.presets import STAGES, Models
from jddtree.errors import UserError
from jddtree.parallel.mesh import EXPERT_LAYOUTS

TOKENS, TINY_TOKENS = (1, 9, 17, 33, 65), (1, 9)
CONTEXTS, TINY_CONTEXTS, MESH_CONTEXTS = (4096, 32768, 131072), (128, 256), (4096, 131072)
CHUNK, TINY_CHUNK = 2048, 32
CHECKS = ("repeat", "sweep")
MESH_STAGES = ("verify", "round")
ROOM = 1024  # tokens that the caches hold beyond the longest context, for the rounds that are timed


@dataclass(frozen=True)
class Settings:
    """models: the configurations; stages: which to measure, "repeat" and "sweep" being checks; chunk: prompt
    tokens of a prefill call; kernels: their implementation; threads: compile at a time; mesh: devices that
    run all ranks, None for one that runs one of them; expert_layout: of the mesh.
    """

    models: Models
    world: int
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    routings: tuple[str, ...]
    stages: tuple[str, ...]
    dtype: jnp.dtype
    chunk: int
    kernels: str
    seed: int
    threads: int
    mesh: int | None
    expert_layout: str

    @property
    def capacity(self) -> int:
        """Tokens that the caches hold."""
        return max(self.contexts) + ROOM


def settings(
    *,
    preset: str = "kimi-k2.6",
    world: int = 8,
    tokens: str | None = None,
    context: str | None = None,
    routing: str = "uniform",
    stages: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    dtype: str = "bfloat16",
    kernels: str = "auto",
    seed: int = 0,
    threads: int = 8,
    mesh: int | None = None,
    expert_layout: str = "tensor",
) -> Settings:
    """From the texts of the command line, None for the default; UserError for what cannot be measured."""
    tiny = preset == "tiny"
    if world not in (1, 2, 4, 8):
        raise UserError(f"--world is {world}, but must be 1, 2, 4 or 8")
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype is {dtype!r}, but must be bfloat16 or float32")
    _check_mesh(mesh, world, expert_layout, experts)
    whole_contexts = MESH_CONTEXTS if mesh else CONTEXTS
    return Settings(
        models=step_presets.models(preset, layers, experts),
        world=world,
        tokens=numbers("--tokens", tokens, TINY_TOKENS if tiny else TOKENS, 256),
        contexts=numbers("--context", context, TINY_CONTEXTS if tiny else whole_contexts, 2**18 - ROOM),
        routings=names("--routing", routing, step_routing.NAMES),
        stages=MESH_STAGES if mesh and stages is None else names("--stages", stages, STAGES + CHECKS),
        dtype=jnp.dtype(dtype),
        chunk=TINY_CHUNK if tiny else CHUNK,
        kernels=kernels,
        seed=seed,
        threads=threads,
        mesh=mesh,
        expert_layout=expert_layout,
    )


def _check_mesh(mesh: int | None, world: int, layout: str, experts: int | None) -> None:
    if layout not in EXPERT_LAYOUTS:
        raise UserError(f"--expert-layout is {layout!r}, but must be of {','.join(EXPERT_LAYOUTS)}")
    if mesh is not None and (mesh != world or mesh < 2):
        raise UserError(
            f"--mesh is {mesh} and --world {world}, but a mesh runs all ranks: give 2, 4 or 8 to both"
        )
    if mesh is None and layout != "tensor":
        raise UserError(
            f"--expert-layout is {layout}, but one rank alone holds slices of experts; give --mesh"
        )
    if experts is not None and experts % world:
        raise UserError(f"--experts is {experts}, but must be a multiple of the {world} ranks")
