"""One pass of the target at K2.6's size (a rank of eight), lowered to a GPU: the kernels of its layers, in
their order.

The table is what was measured on the card: another kernel in a layer, one more, or another grid changes its
speed. A cell is grid / warps / stages; "-" is no kernel. Where jax has them, every kernel lets the next one
begin early, but for Mosaic ones and for the last of a loop over layers of a single row.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jddtree.benchmarks.step.rank import presets as step_presets
from jddtree.benchmarks.step.rank import random_parameters as step_parameters
from jddtree.errors import UserError
from jddtree.models.kernels import Kernels
from jddtree.models.parameters import nest
from jddtree.models.target import Rows, Target
from pallas_kernels.common.device import JAX_VERSION, mosaic_supported
from pallas_kernels.common.lowering import (
    MOSAIC_TARGET,
    TRITON_TARGET,
    cuda_target,
    quiet_triton,
)
from pallas_kernels.common.stack import Place

ROWS = (1, 9, 33)
FIRST = "residual_norm       1x1x1/16/1      9x1x1/16/1     33x1x1/16/1"
QUERIES = """
stack_matmul                33x4x1/4/5      33x4x1/4/5      33x4x1/4/5
latent_projection            1x2x1/8/1       9x2x1/8/1      33x2x1/8/1
stack_matmul                24x4x1/4/3      24x4x1/4/3      24x4x1/4/3
absorbed_queries             8x9x1/4/1       8x9x1/4/1       8x5x3/4/1
"""
TRITON_SPLIT = """
tree_attention_split       1x132x1/4/2      2x66x1/8/2      5x26x1/8/2
tree_attention_merge       1x16x16/4/1      2x16x8/4/1      5x16x8/4/1
"""
MOSAIC_SPLIT = """
mosaic                               .               .               .
tree_attention_merge       1x1x128/4/1      2x2x64/4/1      5x1x32/4/1
"""
OUTPUT = """
head_values                  8x8x1/4/3       8x8x1/4/3       8x4x3/4/3
stack_matmul               112x1x1/4/5     112x1x1/4/5     112x1x1/4/5
residual_norm               1x1x1/16/1      9x1x1/16/1     33x1x1/16/1
"""
DENSE = """
stack_matmul                72x4x1/4/3      72x4x1/4/3      72x4x1/4/3
gated_activation             1x5x1/2/1       9x5x1/2/1      33x5x1/2/1
stack_matmul               112x1x1/4/5     112x1x1/4/5     112x1x1/4/5
residual_norm               1x1x1/16/1      9x1x1/16/1     33x1x1/16/1
"""
MOE = """
stack_matmul                14x8x1/4/5      14x8x1/4/5      14x8x1/4/5
expert_choice                1x2x1/1/1       9x2x1/1/1      33x2x1/1/1
stack_matmul               112x1x1/4/3     112x1x1/4/3     112x1x1/4/3
expert_ranks                         -       9x1x1/4/1      33x1x1/4/1
expert_work_list             1x1x1/1/1       9x1x1/4/1      33x1x1/4/1
expert_gate_up             112x8x1/1/1     56x72x1/1/1    32x264x1/1/1
gated_activation             8x1x1/2/1      72x1x1/2/1     264x1x1/2/1
expert_down                112x8x1/1/1     14x72x1/1/1    16x264x1/1/1
residual_norm               1x1x1/16/1      9x1x1/16/1     33x1x1/16/1
"""


def cells_of(rows: int, table: str) -> list[tuple[str, str]]:
    """Name and cell of each kernel of a table, for so many rows."""
    lines = [line.split() for line in table.splitlines() if line]
    cells = [(name, columns[ROWS.index(rows)]) for name, *columns in lines]
    return [(name, cell) for name, cell in cells if cell != "-"]


def lower_target(rows: int) -> str:
    """StableHLO of one pass over three layers, one of them dense."""
    models = step_presets.models("kimi-k2.6", 3)
    table = step_parameters.rank_tables(models, 8)["target"]
    shape = jax.ShapeDtypeStruct
    dtype = lambda parameter: jnp.bfloat16 if parameter.dtype == "compute" else parameter.dtype
    weights = nest({path: shape(parameter.shape, dtype(parameter)) for path, parameter in table.items()})
    seen = Rows(
        positions=shape((1, rows), jnp.int32),
        valid=shape((1, rows), jnp.bool_),
        ancestors=shape((1, rows, -(-rows // 32)), jnp.uint32),
        lengths=shape((1,), jnp.int32),
    )
    cache = shape((3, 1, 4096, models.target.latent_size), jnp.bfloat16)
    score = lambda weights, tokens, seen, cache: Target(models.target, weights, (1,))(tokens, seen, cache)
    return lower(score, weights, shape((1, rows), jnp.int32), seen, cache)


def lower(function, *arguments) -> str:
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (TRITON_TARGET, MOSAIC_TARGET)]
    with cuda_target(), quiet_triton():
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        return exported(*arguments).mlir_module()


def kernels_of(module: str) -> list[tuple[str, str, bool]]:
    """Name, cell, and whether the next kernel may begin early, of each kernel of a module."""
    kernels = []
    for call in module.split("stablehlo.custom_call @")[1:]:
        if call.startswith(MOSAIC_TARGET):
            kernels.append(("mosaic", ".", False))
        elif call.startswith(TRITON_TARGET):
            grid = "x".join(re.findall(r"grid_[xyz] = (\d+)", call)[:3])
            name, stages, warps = re.findall(
                r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+)', call
            )[-1]
            kernels.append((name, f"{grid}/{warps}/{stages}", "griddepcontrol.launch_dependents" in call))
    return kernels


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("rows", ROWS)
def test_kernels_of_a_pass(rows: int, on_a_gpu) -> None:
    attention = QUERIES + (MOSAIC_SPLIT if mosaic_supported() else TRITON_SPLIT) + OUTPUT
    first, dense, moe = (cells_of(rows, table) for table in (FIRST, attention + DENSE, attention + MOE))
    kernels = kernels_of(lower_target(rows))
    assert [(name, cell) for name, cell, _ in kernels] == first + dense + moe
    overlapping = [name != "mosaic" and JAX_VERSION >= (0, 11) for name, _, _ in kernels]
    if rows == 1:  # what follows a loop over layers is in the same CUDA graph, and XLA's
        overlapping[len(dense)] = False
        overlapping[len(dense + moe)] = False
    assert [overlaps for _, _, overlaps in kernels] == overlapping


def test_what_ranks_add_up_is_complete_before_the_sum_begins(on_a_gpu) -> None:
    """The sum over ranks is XLA's, the sum on one device a kernel of ours."""
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for axis, overlaps in ((None, JAX_VERSION >= (0, 11)), ("model", False)):
        kernels = Kernels(axis=axis)
        product = lambda x, stack, kernels=kernels: (
            kernels.project_out(x, stack, Place(jnp.int32(1))).partial_sums
        )
        ((_, _, overlap_next),) = kernels_of(lower(product, half((8, 256)), half((2, 128, 256))))
        assert overlap_next == overlaps


@pytest.mark.parametrize("implementation, places", [("auto", 9), ("xla", 9), ("triton", 64)])
def test_room_for_the_own_latents(implementation: str, places: int) -> None:
    """Whole tiles where kernels read them; a chunk of a prompt has none of them."""
    room = lambda count: Kernels(implementation).tree_latents(jnp.zeros((2, 1, 16, 24)), 1, count).shape
    assert room(9) == (2, 1, places, 24) and room(200) == (2, 1, 200, 24)


def test_mosaic_without_a_gpu_is_one_line(pair) -> None:
    """What the Hopper kernels need, and what to do."""
    odd = {"o": jax.ShapeDtypeStruct((2, 96, 80), jnp.bfloat16)}
    with pytest.raises(
        UserError, match="--kernels is mosaic, but no kernel takes the sizes .*; give --kernels auto"
    ):
        Kernels.for_weights("mosaic", [odd])
    tokens = jnp.zeros((1, 3), jnp.int32)
    rows = Rows(tokens, tokens == 0, jnp.ones((1, 3, 1), jnp.uint32), tokens[:, 0])
    target = Target(pair.target, pair.weights["target"], kernels="mosaic")
    cache = jnp.zeros((pair.target.num_hidden_layers, 1, 64, pair.target.latent_size))
    with pytest.raises(UserError, match="--kernels is mosaic, but attention needs .*; give --kernels auto"):
        jax.eval_shape(target, tokens, rows, cache)
