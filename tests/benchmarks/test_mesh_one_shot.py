"""The sum over ranks by a Pallas kernel over NVLink, as far as a machine without GPUs can check it: its
lowering.
"""

import jax
import jax.numpy as jnp
import pytest

from jddtree.benchmarks.mesh import chains as mesh_chains
from jddtree.benchmarks.mesh import one_shot as mesh_one_shot
from jddtree.benchmarks.mesh.device_weights import random_normed
from jddtree.parallel.mesh import AXIS, make_mesh
from pallas_kernels.common.device import mosaic_supported
from pallas_kernels.common.lowering import MOSAIC_TARGET

needs_mosaic = pytest.mark.skipif(not mosaic_supported(), reason="plgpu.kernel of jax 0.11")


@needs_mosaic
@pytest.mark.parametrize("ranks, rows", [(2, 1), (8, 33)])
def test_a_chain_lowers_to_one_kernel_that_knows_its_peers(ranks, rows):
    """XLA is told which devices take part and to let them wait for one another first; no multicast is asked
    for.
    """
    form = lambda x: mesh_one_shot.one_shot_sum(x, AXIS, ranks)
    chain = mesh_chains.chain(make_mesh(ranks), form, 3)
    traced = chain.trace(jax.ShapeDtypeStruct((rows, 7168), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{MOSAIC_TARGET}") == 1
    assert (
        f'xla_replica_ids = "{",".join(map(str, range(ranks)))}"' in text
        and "skip_device_barrier = false" in text
    )
    assert "multimem" not in text and "symmetric_memory" not in text


@pytest.mark.parametrize("rows, blocks", [(1, 14), (9, 126), (33, 77), (65, 130)])
def test_blocks_are_equal_and_fit_one_wave(rows, blocks):
    tile = mesh_one_shot._tile(rows * 7168)
    assert rows * 7168 // tile == blocks and blocks * tile == rows * 7168 and tile % mesh_one_shot.STEP == 0


def test_a_machine_that_cannot_run_it_costs_its_row_alone(monkeypatch):
    """On GPUs the form comes last; here its failure takes the place of its times."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mesh_chains, "mosaic_supported", lambda: True)
    monkeypatch.setattr(mesh_chains, "seconds_of", lambda call, x: 1.0)
    *others, last = mesh_chains.measure_reductions(make_mesh(2), (3,), 16, 4)
    assert last["form"] == "pallas_f32" and "no multiple of 512" in last["failure"] and "us_each" not in last
    assert [row["form"] for row in others] == list(mesh_chains.reductions(2)) and "us_each" in others[0]


def test_a_wrong_sum_is_a_failure(monkeypatch):
    """It is compared with psum, on partials that differ, before it is timed."""
    made = random_normed((3, 512), jnp.dtype("float32"), make_mesh(2), 0)
    monkeypatch.setattr(mesh_chains, "one_shot_sum", lambda x, axis, ranks: x * ranks)
    with pytest.raises(RuntimeError, match="off by"):
        mesh_chains._pallas_rows({}, made, make_mesh(2), 0.0, 4)
    monkeypatch.setattr(mesh_chains, "one_shot_sum", lambda x, axis, ranks: jax.lax.psum(x, axis))
    (row,) = mesh_chains._pallas_rows({}, made, make_mesh(2), 0.0, 4)
    assert row["difference"] == 0 and row["us_each"] > 0
