"""`bench step`: floors, forced experts, grouping of kernels, joining of rows, and every stage at a tiny size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jddtree.benchmarks import (
    step,
    step_bench,
    step_clocks,
    step_components,
    step_copies,
    step_floor,
    step_measure,
    step_presets,
    step_routing,
    step_summary,
    step_trace,
    timing,
)
from jddtree.benchmarks.step_bench import Bench
from jddtree.benchmarks.step_programs import random_tree
from jddtree.benchmarks.step_settings import settings
from jddtree.benchmarks.timing import Timing
from jddtree.errors import UserError

BFLOAT16 = jnp.dtype("bfloat16")
TINY = {"preset": "tiny", "context": "64,128", "threads": 2}


@pytest.fixture(scope="module")
def bench():
    """A compiled bench of the tiny preset."""
    made = Bench(settings(**TINY, tokens="9", routing="uniform,zipf"))
    made.compile()
    return made


@pytest.fixture
def compiled(bench, monkeypatch):
    """Measuring takes that one instead of making another, and calls a stage a few times."""
    monkeypatch.setattr(step_clocks, "WARM_SECONDS", 0.01)
    monkeypatch.setattr(step_clocks, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(step_measure, "Bench", lambda settings: bench)
    monkeypatch.setattr(bench, "compile", lambda: None)
    return bench


# ---- Floors ----


@pytest.mark.parametrize("touched, peer_ms", [(8, 1.48), (66, 3.99), (193, 9.47), (288, 13.57)])
def test_floor_is_that_of_the_composed_peer(touched, peer_ms):
    """One rank of eight: the bytes of rank_step.py, which the table of the peers shows."""
    models = step_presets.models("kimi-k2.6")
    parts = step_floor.stage_bytes(models, 8, BFLOAT16, touched, 4096)["verify"]
    assert step_floor.floor_ms(parts) == pytest.approx(peer_ms, abs=0.012)
    assert parts["latents"] == 61 * 4096 * 1152


def test_operations_of_a_chunk():
    """Two for each weight that a token meets; attention grows with the context."""
    models = step_presets.models("kimi-k2.6")
    near, far = (step_floor.prefill_operations(models, 8, 2048, context) for context in (0, 131072))
    assert far - near == 2 * 2048 * 61 * 8 * (576 + 512) * 131072
    attention, experts, rest = 61 * 25.9e6, 60 * 9 * 3 * 7168 * 256, 60 * 2.75e6 + 49.5e6
    context, half_a_chunk = 5376 * 7168 + 6 * 2 * 128 * 7168, 61 * 8 * 1088 * 1024  # fc is split, too
    assert near / 2048 / 2 == pytest.approx(attention + experts + rest + context + half_a_chunk, rel=0.002)


def test_layers_of_a_preset():
    """Fewer layers keep what a layer is; taps stay inside."""
    whole, few = step_presets.models("kimi-k2.6"), step_presets.models("kimi-k2.6", 6)
    assert whole.drafter.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert few.target.num_hidden_layers == few.drafter.num_target_layers == 6
    assert few.target.hidden_size == 7168 and max(few.drafter.target_layer_ids) <= 4
    with pytest.raises(UserError, match="--layers is 62"):
        step_presets.models("kimi-k2.6", 62)


# ---- Rows and experts ----


def test_random_trees_are_trees():
    """Parents stand before their children, no node is too deep, and a row sees its ancestors alone."""
    tree = random_tree(33, 40, 7, 100, seed=1)
    words = np.asarray(tree.ancestors)[0]
    sees = (words[:, np.arange(40) // 32] >> (np.arange(40) % 32)) & 1
    for row in range(33):
        parent = int(tree.parents[0, row])
        above = sees[parent].copy() if row else np.zeros(40)
        above[row] = 1
        assert parent < row and np.array_equal(sees[row], above)
    assert tree.depths.max() <= 7 and sees[33:].sum() == 0 and tree.valid.sum() == 33


def test_routings_touch_as_many_experts_as_they_should():
    """Uniform rows of K2.6 touch what the peers' table says; Zipf rows touch fewer."""
    target = step_presets.models("kimi-k2.6").target
    uniform, zipf = (step_routing.experts(name, target, 40, 0) for name in ("uniform", "zipf"))
    assert uniform.shape == (60, 40, 8)
    assert step_routing.touched(uniform, 33) == pytest.approx(192, abs=4)
    assert step_routing.touched(zipf, 33) < 150
    assert step_routing.experts("uniform", target, 1, 0).shape == (60, 1, 8)
    trace = step_routing.experts("trace", target, 72, 5)
    assert trace.shape == (60, 72, 8) and 120 < step_routing.touched(trace, 33) < 160
    assert all(len(set(row)) == 8 for row in trace[7].tolist()) and trace.max() < 384
    with pytest.raises(UserError, match="--routing is 'other'"):
        step_routing.experts("other", target, 1, 0)


def test_the_trace_keeps_what_rows_share():
    """A row's experts lie in the blocks that the micro router chose; rows of one token share them in a shared block."""
    trace = step_trace.load()
    chosen = step_trace.mapped(trace, 10, 65, 384, 8, seed=3)
    assert np.array_equal(chosen[7, :, ::2] // 24, trace.experts[3, 2]) and np.array_equal(
        chosen[7, :, 1::2] // 24, trace.experts[3, 2]
    )
    tokens = trace.tokens[3]
    first, second = next((a, b) for a in range(65) for b in range(a + 1, 65) if tokens[a] == tokens[b])
    shared = set(trace.experts[3, 0, first]) & set(trace.experts[3, 0, second])
    assert len(set(chosen[0, first]) & set(chosen[0, second])) == 2 * len(shared)
    with pytest.raises(UserError, match="multiples of 16 experts and 4 choices"):
        step_trace.mapped(trace, 1, 1, 100, 8, seed=0)


def test_verify_routes_rows_to_the_forced_experts(bench):
    """The model reports the experts that it used; finite logits; the routing changes the result."""
    made = {routing: bench.call("verify", 9, 64, routing)() for routing in ("uniform", "zipf")}
    for routing, verified in made.items():
        assert np.array_equal(verified.scored.experts[:, 0], bench.experts(9, routing))
        assert verified.finite.all()
    assert not np.array_equal(made["uniform"].scored.hidden, made["zipf"].scored.hidden)


# ---- The bench ----


def test_every_stage_is_measured(compiled):
    """By the wall clock: no failure, a time for each case, and the checks hold."""
    rows = list(step_measure.measure(compiled.settings, "wall"))
    assert [row for row in rows if "failure" in row] == []
    timed = {(row["stage"], row["tokens"]) for row in rows if "time_ms" in row}
    stages = ("verify", "draft", "build", "walk", "commit", "round")
    assert timed == {("prefill", 32), *((stage, 9) for stage in stages)}
    checks = {row["stage"]: row for row in rows if row["stage"] in ("repeat", "sweep")}
    assert checks["repeat"]["repeats_identical"] and checks["sweep"]["compilations"] == 0
    assert all(row["ratio"] == row["time_ms"] / row["floor_ms"] for row in rows if row["stage"] == "verify")


def test_one_token_is_a_plain_pass_without_the_drafter(bench, monkeypatch):
    """The same weights; a cache of its own for the drafter would be as long as the context."""
    monkeypatch.setattr(step_bench, "random_weights", lambda *_: bench.weights)
    one = Bench(settings(**TINY, tokens="1", stages="verify"))
    one.compile()
    verified = one.call("verify", 1, 64, "uniform")()
    assert verified.choices.shape == (1, 1) and verified.finite.all() and one.state(1, 9).draft == ()
    assert np.array_equal(verified.scored.experts[:, 0], one.experts(1, "uniform"))
    assert [case.stage for case in step_measure.cases(settings(**TINY, tokens="1"))] == ["verify"] * 2 + [
        "round"
    ] * 2 + ["prefill"] * 2


def test_kernels_of_every_stage_are_grouped(compiled, monkeypatch):
    """Stages run under a profiler of two kernels; dispatches of rounds all start at the same length."""
    lengths = []

    def profiled(call, arguments):
        jax.block_until_ready([call(), call()])
        lengths.append(getattr(call, "again", None))
        return Timing([("expert_gate_up", 3.0), ("fusion_7", 1.0)], 4.0)

    monkeypatch.setattr(timing, "measure", profiled)
    rows = list(step_measure.measure(compiled.settings, "kernels"))
    assert [row for row in rows if "failure" in row] == [] and True in lengths and False not in lengths
    assert all(row["kernels"]["experts gate_up"] == 3.0 and row["launches"] == 2 for row in rows)


def test_a_stage_that_fails_costs_its_row_alone(compiled, monkeypatch):
    """An error becomes the row's failure; rows after it are measured, also when it took the caches with it."""
    real = compiled.call

    def broken(stage, *size):
        if stage == "commit":
            compiled.caches["latents"].delete()
            raise RuntimeError("out of memory")
        return real(stage, *size)

    monkeypatch.setattr(compiled, "call", broken)
    rows = list(step_measure.measure(compiled.settings, "wall"))
    assert {row["stage"] for row in rows if "failure" in row} == {"commit"}
    assert [row["failure"] for row in rows if "failure" in row] == ["RuntimeError: out of memory"]


HLO = """
HloModule jit_verify, is_scheduled=true
%body (p: (f32[2])) -> f32[2] {
  %get-tuple-element.5 = bf16[60,1536,7168]{2,1,0} get-tuple-element(%p), index=3
  %get-tuple-element.6 = bf16[60,7168]{1,0} get-tuple-element(%p), index=4
  %fusion.12 = bf16[40,7168]{1,0} fusion(%x, %get-tuple-element.6), kind=kLoop, calls=%c, metadata={op_name="a(%b)"}
  %table = s32[60,40,8]{2,1,0} get-tuple-element(%p), index=5
  %loop_dynamic_slice_fusion = s32[40,8]{1,0} fusion(%table, %i), kind=kLoop, calls=%e
  ROOT %gemm_fusion_dot.3 = bf16[40,1536]{1,0} fusion(%fusion.12, %get-tuple-element.5), kind=kCustom, calls=%d
}
"""


def test_kernels_belong_to_the_parameter_that_they_read():
    """By name where it is one of ours, else by the shapes of the instruction's operands."""
    sizes = {"q_a": (60, 1536, 7168), "input_norm": (60, 7168), "forced_experts": (60, 40, 8)}
    weights = {"target": {"moe": {name: np.zeros(size, bool) for name, size in sizes.items()}}}
    shapes = step_components.shapes_of(weights)
    kernels = [
        ("gemm_fusion_dot_3", 5.0),
        ("fusion_12", 2.0),
        ("fusion_99", 1.0),
        ("expert_down", 7.0),
        ("loop_dynamic_slice_fusion", 0.5),
        ("loop_dynamic_slice_fusion_1", 0.25),
        ("nvjet_x", 3.0),
    ]
    assert step_components.components(kernels, HLO, shapes) == {
        "experts down": 7.0, "q_a + kv_a": 5.0, "matmul library": 3.0, "norms": 2.0, "other": 1.0,
        "forced routing": 0.5, "copy": 0.25,
    }  # fmt: skip
    largest = step_components.largest([*kernels, ("fusion_12", 4.0)], 2)
    assert largest[1] == {"kernel": "fusion_12", "launches": 2, "us": 6.0}


def test_rows_of_both_clocks_are_joined():
    """Kernels complete the row of the wall clock; a round's host share follows; a peer of the same size is shown."""
    rows = {}
    size = {"stage": "round", "tokens": 33, "context": 4096, "routing": "uniform"}
    step.join(rows, size | {"time_ms": 10.0, "busy_ms": 9.9, "host_percent": 1.0, "rounds": 8})
    peers = [{"stage": "round", "tokens": 33, "context": 4096, "peer": "other", "time_ms": 26.5}]
    joined = step.join(rows, size | {"kernel_ms": 78.408}, peers)
    assert joined["idle_percent"] == pytest.approx(1.0) and joined["peer_ms"] == 26.5
    assert len(rows) == 1 and "10" in step.line_of(joined)
    failed = step.join(rows, size | {"failure": "CUPTI saw nothing"})
    assert failed["time_ms"] == 10.0 and failed["failure"] == "CUPTI saw nothing"


def test_a_summary_sets_the_rest_of_a_round_beside_its_verify_pass():
    """By the wall clock, and by kernels where all four stages have them; some stages are measured at one context."""
    size = {"tokens": 33, "context": 32768, "routing": "zipf"}
    rows = [size | {"stage": "round", "time_ms": 10.0}, size | {"stage": "verify", "time_ms": 9.0}]
    rows += [size | {"stage": "verify", "routing": "uniform", "time_ms": 9.9}]
    assert step_summary.summaries(rows) == [
        size | {"stage": "summary", "beside_verify_ms": 1.0, "beside_verify_percent": 10.0}
    ]
    first = {"tokens": 33, "context": 4096, "routing": "uniform"}
    rows += [first | {"stage": stage, "kernel_ms": 0.1} for stage in ("build", "walk", "commit")]
    rows += [size | {"stage": "draft", "routing": "uniform", "kernel_ms": 0.5}]
    assert step_summary.summaries(rows)[0]["kernels_percent"] == pytest.approx(8.0)


def test_copies_of_weights_are_found():
    """A loop that slices a layer for two uses copies it; one that takes a row of it does not. XLA's own text."""
    weights, x = jnp.ones((5, 96, 160)), jnp.ones((7, 160))

    def twice(x, weights):
        return jax.lax.scan(lambda x, one: (jnp.tanh((x @ one.T) @ one), None), x, weights)[0]

    def a_row(x, weights):
        return jax.lax.fori_loop(0, 5, lambda layer, x: x * jnp.tanh(weights[layer, 0])[None], x)

    texts = [jax.jit(function).lower(x, weights).compile().as_text() for function in (twice, a_row)]
    found = [step_copies.weight_copies(text, [weights.shape], least=1000) for text in texts]
    assert len(found[0]) == 1 and found[0][0].endswith("[96,160]") and found[1] == []
    assert step_copies.weight_copies(texts[0], [weights.shape]) == []


def test_the_command_measures_in_a_process_of_its_own(tmp_path, capsys):
    """Rows on stdout, one JSON object as the last line, and the same in the file; no profile without a GPU."""
    output = tmp_path / "step.json"
    options = ["--preset=tiny", "--tokens=9", "--context=64", "--stages=walk", "--threads=2", f"--output={output}"]
    assert step.main(options) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(output.read_text()) and record["rows"][0]["stage"] == "walk"
    assert set(record) == {"command", "date", "commit", "card", "versions", "platform", "rows"}


@pytest.mark.parametrize("options, message", [
    (["--preset=k3"], "--preset is 'k3'"), (["--stages=verify,walks"], "--stages is"), (["--tokens=0"], "--tokens is"),
])  # fmt: skip
def test_wrong_options_end_with_one_line(options, message, capfd):
    """The measuring process says what is wrong, and the command ends with 1."""
    assert step.main(options) == 1
    assert message in capfd.readouterr().err


def test_matmuls_of_a_stack_belong_to_what_ran_before_them():
    """One kernel multiplies by every weight of a layer; its place in the layer says by which."""
    attention = ["latent_projection", "stack_matmul", "absorbed_queries", "attention_split", "attention_merge"]
    block = ["stack_matmul", "expert_choice", "stack_matmul", "expert_work_list", "expert_gate_up", "expert_down"]
    layer = ["residual_norm", "stack_matmul", *attention, "head_values", "stack_matmul", "residual_norm", *block]
    found = step_components.components([(name, 1.0) for name in layer * 2], "", {})
    assert found == {
        "norms": 6.0, "q_a + kv_a": 2.0, "q_b": 2.0, "absorb": 2.0, "attention split": 2.0, "attention merge": 2.0,
        "v_up": 2.0, "o": 2.0, "router + shared": 2.0, "router": 2.0, "shared": 2.0, "work list": 2.0,
        "experts gate_up": 2.0, "experts down": 2.0,
    }  # fmt: skip


def test_products_of_a_drafter_are_not_told_apart():
    kernels = [("stack_matmul__2", 3.0), ("draft_heads", 1.0), ("draft_attention_split", 2.0), ("stack_matmul", 4.0)]
    found = step_components.components(kernels, "", {}, drafts=True)
    assert found == {"draft products": 7.0, "attention split": 2.0, "draft heads": 1.0}
