"""`bench step --mesh`: all ranks on eight CPU devices compute what one device does; what is said of a mesh's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jddtree.benchmarks import step, step_bench, step_mesh, step_presets, step_routing, step_summary, step_table
from jddtree.benchmarks import step_programs as programs
from jddtree.benchmarks.mesh_kernels import CALLS
from jddtree.benchmarks.step_bench import Bench
from jddtree.benchmarks.step_settings import settings
from jddtree.errors import UserError

RANKS = 8
SIZES = {"preset": "tiny", "tokens": "9", "context": "64", "dtype": "float32", "stages": "verify", "threads": 2}


@pytest.fixture(scope="module")
def bench():
    """All ranks, with whole experts on each, compiled for a verify pass."""
    made = Bench(settings(**SIZES, world=RANKS, mesh=RANKS, expert_layout="expert"))
    made.compile()
    return made


def test_a_mesh_computes_what_one_device_does(bench, monkeypatch):
    """The same weights, caches, tree and experts of rows, gathered on one device."""
    found = jax.device_get(bench.call("verify", 9, 64, "uniform")())
    weights = jax.tree.map(np.asarray, bench.weights)
    experts = {name: array.reshape(-1, *array.shape[-3:]) for name, array in weights["target"]["experts"].items()}
    weights["target"] = weights["target"] | {"experts": experts}
    monkeypatch.setattr(step_bench, "random_weights", lambda *_: jax.device_put(weights))
    alone = Bench(settings(**SIZES, world=1))
    alone.caches = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), bench.caches)
    alone.compile()
    wanted = jax.device_get(alone.call("verify", 9, 64, "uniform")())
    np.testing.assert_allclose(found.scored.hidden[0, :9], wanted.scored.hidden[0, :9], atol=1e-5)
    assert np.abs(wanted.scored.hidden).max() > 1 and found.finite.all()
    assert np.array_equal(found.choices[0, :9], wanted.choices[0, :9]) and len(set(found.choices[0, :9])) > 2
    assert np.array_equal(found.scored.experts[:, 0], bench.experts(9, "uniform"))


def test_every_device_holds_its_slices_and_nothing_more(bench):
    """Slices differ from rank to rank; what is on every rank is the same there, the experts of rows included."""
    weights = bench.rank_weights(9, "uniform")
    for array in jax.tree.leaves(weights) + jax.tree.leaves(bench.caches):
        shards = [np.asarray(shard.data) for shard in array.addressable_shards]
        split = "model" in array.sharding.spec
        assert len(shards) == RANKS and shards[0].size == array.size // (RANKS if split else 1)
        assert np.array_equal(shards[0], shards[5]) != split
    assert weights["target"]["experts"]["down"].addressable_shards[3].data.shape[:2] == (2, 2)
    assert weights["target"]["moe"]["forced_experts"].sharding.is_fully_replicated
    one = np.std(np.asarray(weights["target"]["moe"]["o"])) * np.sqrt(weights["target"]["moe"]["o"].shape[-1])
    assert one == pytest.approx(1, rel=0.03)  # the whole sum's width, not a rank's


def test_a_rank_alone_takes_the_slices_of_the_first_device(bench, monkeypatch):
    """Without collectives and copies; the drafter's heads and the vocabulary are those of a rank."""
    given = {}

    def compile_stage(shapes, stage, weights, state):
        given.update(axis=shapes.program.axis, weights=weights, state=state)
        return programs.Compiled(lambda *arguments: arguments, 0.0)

    monkeypatch.setattr(programs, "compile_stage", compile_stage)
    weights, *_ = step_mesh.rank_alone(bench, 9, 64, "uniform")()
    assert given["axis"] is None and given["state"].draft.keys.shape[3] == 1
    first = bench.weights["target"]["embed"].addressable_shards[0].data
    assert weights["target"]["embed"].unsafe_buffer_pointer() == first.unsafe_buffer_pointer()
    assert all(array.devices() == {jax.devices()[0]} for array in jax.tree.leaves(given["weights"]))


def test_the_busiest_rank_has_a_layer_s_floor():
    """Four experts of two ranks; rows beyond the tree do not count."""
    chosen = np.array([[[0, 1], [1, 2], [3, 0]], [[2, 3], [2, 3], [0, 1]]], np.int32)
    assert step_routing.touched_of_busiest(chosen, 2, 4, 2) == 2.0
    assert step_routing.touched_of_busiest(chosen[:, :, :1], 2, 4, 2) == 1.5


# ---- Rows ----


def events(kernels, device="/device:GPU:0"):
    return [(device, name, 1e3 * us) for _ in range(CALLS) for name, us in kernels]


def test_kernels_that_only_the_mesh_has_are_what_splitting_costs():
    """Names without the compiler's numbers; times of the first device, and the least of all."""
    layer = [("residual_norm", 2.0), ("stack_matmul", 5.0), ("expert_down", 10.0)]
    split = [("residual_norm", 2.0), ("stack_matmul", 5.0), ("psum_12", 3.0), ("expert_down", 10.0), ("psum_13", 5.0)]
    other = [("psum_12", 3.0), ("psum_13", 1.0)]
    row = step_mesh.compared(events(layer), events(split) + events(other, "/device:GPU:1"), "", {})
    assert row["kernel_ms"] == pytest.approx(0.025) and row["launches"] == 5
    assert row["mesh_only_ms"] == pytest.approx(0.008) and row["mesh_only_percent"] == pytest.approx(32)
    assert row["mesh_only_least_ms"] == pytest.approx(0.004) and row["alone_kernel_ms"] == pytest.approx(0.017)
    assert row["mesh_only"] == [
        {"kernel": "psum_13", "launches": 1, "us": 5.0}, {"kernel": "psum_12", "launches": 1, "us": 3.0}
    ]  # fmt: skip
    assert row["kernels"] == pytest.approx(
        {"only on the mesh": 8.0, "experts down": 10.0, "q_a + kv_a": 5.0, "norms": 2.0}
    )
    assert row["largest"][0]["kernel"] == "expert_down" and len(row["largest"]) == 5


def test_rows_of_a_mesh_are_set_beside_a_rank_and_the_other_layout():
    size = {"stage": "verify", "tokens": 9, "context": 4096, "routing": "uniform"}
    rows = [size | {"mesh": 8, "expert_layout": layout, "time_ms": time} for layout, time in
            (("tensor", 10.0), ("expert", 12.0))]  # fmt: skip
    others = [size | {"routing": "zipf", "time_ms": 1.0}, size | {"stage": "roofline"}, size | {"time_ms": 8.0}]
    first, second = step_summary.beside(rows, others)
    assert (first["rank_ms"], first["sums_ms"], first["sums_percent"]) == (8.0, 2.0, 20.0)
    assert (second["expert_layout"], second["tensor_ms"]) == ("expert", 10.0)
    table = step_table.split([rows[0] | first, rows[1], others[1]]).splitlines()
    assert len(table) == 4 and "20.0" in table[2] and "expert" in table[3]
    assert step_summary.beside(rows[:1], []) == step_summary.beside(rows[1:], others) == []


def test_layouts_are_measured_one_after_the_other(monkeypatch, capsys, tmp_path):
    """A process for each; rows of one size are told apart by their layout, and so are their summaries."""
    alone = tmp_path / "rank.json"
    alone.write_text(
        '{"rows": [{"stage": "verify", "tokens": 9, "context": 64, "routing": "uniform", "time_ms": 1.0}]}'
    )

    def process(given, clock, layout):
        size = {"tokens": 9, "context": 64, "routing": "uniform", "mesh": 2, "expert_layout": layout}
        yield {"platform": "cpu"}
        yield size | {"stage": "verify", "time_ms": 2.0}
        yield size | {"stage": "round", "time_ms": 4.0 if layout == "tensor" else 5.0}

    monkeypatch.setattr(step, "_process", process)
    assert step.main(["--mesh=2", "--world=2", "--expert-layout=tensor,expert", f"--rank={alone}"]) == 0
    lines = capsys.readouterr().out
    assert "sums % 50" in lines and "tensor ms 4" in lines
    assert [line.split()[-1] for line in lines.splitlines() if line.startswith("summary")] == ["50", "60"]
    assert step.main(["--mesh=2", "--rank=missing.json"]) == 1
    assert "--rank missing.json" in capsys.readouterr().err


@pytest.mark.parametrize("options, message", [
    ({"mesh": 4}, "--mesh is 4 and --world 8"), ({"expert_layout": "expert"}, "give --mesh"),
    ({"expert_layout": "rows", "mesh": 8}, "--expert-layout is 'rows'"), ({"experts": 12}, "multiple of the 8 ranks"),
])  # fmt: skip
def test_meshes_that_cannot_be_measured(options, message):
    with pytest.raises(UserError, match=message):
        settings(**options)


def test_more_ranks_than_devices_end_with_one_line(monkeypatch, capfd):
    """No row is measured, and the measuring process says what is wrong."""
    monkeypatch.setenv("XLA_FLAGS", "")
    assert step.main(["--preset=tiny", "--mesh=8", "--stages=verify"]) == 1
    output, errors = capfd.readouterr()
    assert output == "" and "--mesh is 8, but 1 cpu device(s) are there" in errors


def test_fewer_experts_and_the_stages_of_a_mesh():
    """Everything else of a layer stays; a mesh measures what the whole machine is for."""
    few = step_presets.models("kimi-k2.6", 15, 96).target
    assert (few.n_routed_experts, few.num_hidden_layers, few.hidden_size) == (96, 15, 7168)
    with pytest.raises(UserError, match="--experts is 4"):
        step_presets.models("kimi-k2.6", None, 4)
    made = settings(mesh=8)
    assert made.stages == ("verify", "round") and made.contexts == (4096, 131072)
