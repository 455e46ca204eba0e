"""What is fixed when a round is compiled: shapes, models, kernels, and how XLA compiles it on this
machine.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import jax

from jddtree.config import DrafterConfig, TargetConfig, check_pair
from jddtree.decoding.state import Capacity
from jddtree.errors import UserError
from jddtree.limits import CHUNK, ROUNDS, ROWS, SEQUENCES
from jddtree.models.kernels import one_graph
from jddtree.models.observer import Observer
from pallas_kernels.common.device import JAX_VERSION

LIMITS = {"rows": ROWS, "sequences": SEQUENCES, "rounds": ROUNDS, "chunk": CHUNK}
# What a CUDA graph holds: loops, too, so that all layers are one graph.
LOOPS_TOO = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"


@dataclass(frozen=True)
class Program:
    """Everything that is fixed when the round is compiled. kernels: implementation, as in `common/choice.py`.
    axis: the mesh axis that the weights are split over, None on one device. observer: sees and may change
    which experts rows go to, for recorders and benchmarks.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    capacity: Capacity
    kernels: str = "auto"
    axis: str | None = None
    observer: Observer | None = None

    @property
    def block(self) -> int:
        """Most tokens that a round can emit: the depth of its drafts and one more."""
        return self.drafter.block_size if self.drafter else 1


class Keeper(Protocol):
    """Keeps the compiled programs of one engine for later processes."""

    def load(self, name: str) -> jax.stages.Compiled | None:
        """A program that was kept, None where there is none."""

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keep a program that was compiled `apart_from_jax`."""

    def apart_from_jax(self) -> AbstractContextManager[None]:
        """Compile without JAX's own cache: what comes from there cannot be kept again."""


def check_program(program: Program) -> None:
    """Raise UserError when the compiled capacity cannot work."""
    capacity, target = program.capacity, program.target
    if (
        sorted({*capacity.widths, capacity.rows}) != [*capacity.widths, capacity.rows]
        or min(capacity.widths, default=1) < 1
    ):
        raise UserError(
            f"the capacity's widths are {capacity.widths}, but must rise from 1 to less than {capacity.rows}"
        )
    for name, limit in LIMITS.items():
        limit.check(f"the capacity's {name}", getattr(capacity, name))
    if program.drafter is None:
        if capacity.rows != 1:
            raise UserError(
                f"capacity is {capacity.rows} rows without a drafter, but then it is 1; give --draft"
            )
    else:
        check_pair(target, program.drafter)
        if capacity.rows < program.block:
            raise UserError(
                f"capacity is {capacity.rows} rows, but a chain of block size {program.block} needs "
                f"{program.block}; raise --capacity to at least {program.block}"
            )
        if not 1 <= capacity.candidates <= target.vocab_size:
            raise UserError(
                f"candidates per slot is {capacity.candidates}, but must be 1 to {target.vocab_size}"
            )
    if not 2 <= capacity.context <= target.max_position_embeddings:
        raise UserError(
            f"--max-context is {capacity.context} tokens, but this target takes 2 to "
            f"{target.max_position_embeddings}"
        )


def compiler_options(rows: int | None = None) -> dict[str, str | bool]:
    """Options for `jax.stages.Lowered.compile`; rows: of a verify pass on one device, None on several."""
    if jax.default_backend() != "gpu":
        # On a CPU LLVM's higher levels compile a third longer and run no faster.
        # Parts of a program are compiled apart; 32 of them, the default, cost more than they save.
        return {"xla_backend_optimization_level": "1", "xla_cpu_parallel_codegen_split_count": "4"}
    # Kernels of a CUDA graph that do not wait for one another overlap: 3 to 6 % of a step.
    options: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    chosen_by_user = COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "")
    if rows is not None and one_graph(rows) and JAX_VERSION >= (0, 11) and not chosen_by_user:
        # One graph for all layers instead of one for each: 5 % of a pass of one row, slower for many.
        options |= {COMMAND_BUFFERS: LOOPS_TOO, "xla_gpu_command_buffer_unroll_loops": True}
    return options


def compiled(
    recipes: Mapping[str, Callable[[], jax.stages.Lowered]],
    options: Mapping[str, dict[str, str | bool]],
    kept: Keeper | None,
) -> dict[str, jax.stages.Compiled]:
    """Programs by name: those that were kept, the others lowered in turn, each compiled while the next is.

    A program takes exactly the shapes it was lowered for: calling it with others raises instead of compiling
    again. options: by name, else `compiler_options()`.
    """
    with ThreadPoolExecutor(len(recipes)) as pool:
        loaded = pool.map(kept.load, recipes) if kept else [None] * len(recipes)
        programs = {name: program for name, program in zip(recipes, loaded, strict=True) if program}
        missing = [name for name in recipes if name not in programs]
        with kept.apart_from_jax() if kept and missing else nullcontext():
            compiling = {}
            for name in missing:
                chosen = options.get(name, compiler_options())
                compiling[name] = pool.submit(recipes[name]().compile, compiler_options=chosen)
            fresh = {name: future.result() for name, future in compiling.items()}
    if kept is not None:
        for name, program in fresh.items():
            kept.save(name, program)
    return programs | fresh
