"""Benchmarks of the kernels: the formulas of the roofline, routings, checks that find faults, the command on
a CPU.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_packing import pack_down, pack_gate_up

from jddtree.benchmarks.clocks import cupti as timing
from jddtree.benchmarks.clocks.cupti import Timing
from jddtree.benchmarks.kernels import attention_rows as kernels_attention
from jddtree.benchmarks.kernels import expert_rows as kernels_expert
from jddtree.benchmarks.kernels import peer_times as kernels_peers
from jddtree.benchmarks.kernels import printing as kernels_table
from jddtree.benchmarks.kernels import roofline
from jddtree.benchmarks.kernels import suite as kernels
from jddtree.benchmarks.kernels.attention_cases import random_ancestors
from jddtree.benchmarks.kernels.comparison import check
from jddtree.benchmarks.kernels.cublas import NAME as PLAIN
from jddtree.benchmarks.kernels.random_experts import unpack
from jddtree.benchmarks.kernels.roofline import Ceilings, Work
from jddtree.benchmarks.kernels.routings import Routing, most_tokens, routing, touched
from jddtree.benchmarks.kernels.sizes import settings
from jddtree.cli.main import app, guarded
from jddtree.errors import UserError
from pallas_kernels.experts.api import PackedExperts

H200 = Ceilings(copy=4.3e12, read=4.19e12, matmul=790e12)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `bench kernels` in this process -> exit code, lines of stdout, last line of stderr."""
    monkeypatch.setenv("XLA_FLAGS", "")  # the command adds to it

    def run(*arguments):
        code = guarded(lambda: app(["bench", "kernels", *map(str, arguments)], standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.strip().splitlines()[-1:]

    return run


# ---- Roofline ----


def expected_experts(sizes, tokens: int) -> float:
    """Distinct experts that tokens touch when each chooses top_k uniformly."""
    return sizes.experts * (1 - (1 - sizes.top_k / sizes.experts) ** tokens)


def test_bytes_of_an_expert_of_one_rank_of_eight():
    """512 x 7168 and 7168 x 256 weights of half a byte, and two bytes for every 32."""
    sizes = roofline.k26_rank(8)
    assert sizes.rank_heads == 8
    assert roofline.gate_up_bytes(sizes) == 512 * 7168 // 2 + 512 * 224 * 2 == 2_064_384
    assert roofline.down_bytes(sizes) == 7168 * 256 // 2 + 7168 * 8 * 2 == 1_032_192
    assert roofline.expert_bytes(sizes) == 3_096_576
    assert roofline.expert_bytes(roofline.k26_rank(1)) == 8 * 3_096_576


def test_work_of_the_expert_layer():
    """One token: eight experts, a row in and one out; operations count pairs, not experts."""
    sizes = roofline.k26_rank(8)
    assert roofline.expert_work(sizes, 1, 8) == Work(8 * 3_096_576 + 2 * 7168 * 2, 8 * 2 * 3 * 256 * 7168)
    assert roofline.gate_up_work(sizes, 1, 8).bytes == 8 * 2_064_384 + 7168 * 2 + 2 * 8 * 256 * 4
    assert roofline.down_work(sizes, 1, 8).bytes == 8 * 1_032_192 + 8 * (256 + 7168) * 2
    assert round(expected_experts(sizes, 33)) == 192
    work = roofline.expert_work(sizes, 33, 192)
    assert roofline.bound(work, H200) == "bytes"
    assert roofline.floor_us(work, H200) == pytest.approx(192 * 3.096576 / 4.19, rel=0.01)


def test_work_of_attention():
    """33 rows of 8 heads on 131072 keys: 151 MB and 75 GFLOP, so that operations bind."""
    sizes = roofline.k26_rank(8)
    work = roofline.attention_work(sizes, 33, 131072, 8)
    assert work.bytes == (131072 + 33) * 1152 + 33 * 8 * (576 + 512) * 2 == 151_607_424
    assert work.operations == 2 * 33 * 8 * (131072 + 33) * 1088
    assert work.operations / 1e9 == pytest.approx(75.3, abs=0.05)
    assert roofline.bound(work, H200) == "operations"
    assert roofline.floor_us(work, H200) == pytest.approx(95.3, abs=0.1)
    assert roofline.bound(roofline.attention_work(sizes, 1, 131072, 8), H200) == "bytes"


def test_card_has_a_row_per_kernel_and_size():
    asked = replace(
        settings(check=True, on_gpu=True, tokens="1,33", context="2048", heads="8,64"), timed=True
    )
    rows = kernels.card(asked, H200)
    assert [(row["kernel"], row["tokens"], row.get("heads")) for row in rows] == [
        ("expert_layer", 1, None),
        ("expert_layer", 33, None),
        ("tree_attention", 1, 8),
        ("tree_attention", 33, 8),
        ("tree_attention", 1, 64),
        ("tree_attention", 33, 64),
    ]
    assert rows[0]["experts"] == 8 and rows[0]["megabytes"] == pytest.approx(24.80, abs=0.01)
    assert all(row["floor_us"] > 0 for row in rows)
    assert "floor_us" not in kernels.card(asked, None)[0]


# ---- Routings ----


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_routings_are_distinct_experts_and_repeat(name):
    ids = Routing(name).draw(33, 384, 8)
    assert len(ids) == 4 and all(one.shape == (33, 8) and one.dtype == np.int32 for one in ids)
    assert all(len(set(row)) == 8 for one in ids for row in one.tolist())
    assert all(np.array_equal(*pair) for pair in zip(ids, Routing(name).draw(33, 384, 8), strict=True))
    assert not np.array_equal(ids[0], Routing(name).draw(33, 384, 8, seed=4)[0])


def test_skewed_routing_gives_an_expert_more_than_a_tile():
    assert max(map(most_tokens, Routing("skewed").draw(33, 384, 8))) > 8
    uniform = Routing("uniform")
    assert np.mean([touched(ids) for ids in uniform.draw(33, 384, 8)]) == pytest.approx(192, abs=6)
    assert len(np.unique(np.concatenate(uniform.draw(1, 384, 8)))) == 384


def test_routing_file_is_read_in_windows(tmp_path):
    rows = [[i, i + 1, i + 2] for i in range(7)]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(rows))
    found = routing(str(path))
    assert [ids.tolist() for ids in found.draw(3, 9, 3)] == [rows[:3], rows[3:6]]
    for experts, top_k, tokens in ((8, 3, 3), (9, 2, 3), (9, 3, 8)):
        with pytest.raises(UserError, match="must hold"):
            found.draw(tokens, experts, top_k)


# ---- Times ----


def test_medians_over_calls_and_parts_by_place():
    """Three calls of four kernels; names mark two, what lies between is told by its place."""
    names = ["fusion", "expert_gate_up", "fusion", "expert_down_mosaic", "reduce"]
    records = [
        (name, (1 + place) * (1 + call) / 1e3) for call in range(3) for place, name in enumerate(names)
    ]
    result = timing.summarise(records, 3)
    assert result.kernels == [(name, pytest.approx(2.0 * (1 + place))) for place, name in enumerate(names)]
    assert result.total_us == pytest.approx(30.0)
    parts = timing.parts(result, kernels_expert.LANDMARKS, kernels_expert.BETWEEN)
    assert parts == pytest.approx(
        {
            "expert_work_list": 2,
            "expert_gate_up": 4,
            "expert_activation": 6,
            "expert_down": 8,
            "expert_sum": 10,
        }
    )
    attention = Timing([("pad", 1.0), ("split_kernel", 5.0), ("tree_attention_merge", 2.0)], 8.0)
    assert timing.parts(attention, kernels_attention.LANDMARKS, kernels_attention.BETWEEN) == {
        "attention_prepare": 1.0,
        "attention_split": 5.0,
        "attention_merge": 2.0,
    }


# ---- Checks ----


def test_weights_of_the_reference_are_those_that_were_packed():
    """Codes and scales in Hugging Face order, through the packer and back by the benchmark's own reading."""
    rng = np.random.default_rng(5)
    draw = lambda high, *shape: rng.integers(0, high, shape, dtype=np.uint32)
    shapes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    words = {name: draw(2**32, 2, rows, columns // 8) for name, (rows, columns) in shapes.items()}
    bits = {
        name: draw(2**15 - 256, 2, rows, columns // 32).astype(np.uint16)
        for name, (rows, columns) in shapes.items()
    }
    packed = PackedExperts(
        *pack_gate_up(words["gate"], bits["gate"], words["up"], bits["up"]),
        *pack_down(words["down"], bits["down"]),
    )
    unpacked = unpack(PackedExperts(*map(jnp.asarray, packed)), jnp.array([1, 0]))
    for name, (codes, scales) in unpacked._asdict().items():
        wanted = words[name][..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
        assert np.array_equal(codes, wanted.reshape(2, *shapes[name])[::-1]), name
        assert np.array_equal(np.asarray(scales).view(np.uint32) >> 16, bits[name][::-1]), name


def test_ancestor_words_are_a_tree():
    words = random_ancestors(np.random.default_rng(0), 40, 37, chain=False)
    sees = (words[:, np.arange(40) // 32] >> (np.arange(40) % 32).astype(np.uint32)) & 1
    assert np.array_equal(np.diag(sees), np.arange(40) < 37) and not np.triu(sees, 1).any()
    for row in range(1, 37):  # those of the parent, which is the last ancestor, and itself
        parent = np.flatnonzero(sees[row, :row])[-1]
        assert np.array_equal(sees[row, :row], sees[parent, :row])
    chain = random_ancestors(np.random.default_rng(0), 40, 40, chain=True)
    assert chain[-1].tolist() == [2**32 - 1, 2**8 - 1]


def test_check_finds_each_fault():
    wanted = jnp.array([[1.0, 2.0], [0.0, 0.0]])
    outputs = iter([])

    def run(*rows):
        nonlocal outputs
        outputs = iter([jnp.asarray(row) for row in rows])
        return check(lambda: next(outputs), (), wanted, "case")

    good = wanted * 1.001
    assert run(good, good, good).faults == () and run(good, good, good).error == pytest.approx(1e-3, rel=1e-3)
    assert run(good, good, wanted).faults == ("case: repeats differ",)
    assert "relative error" in run(*[wanted * 1.01] * 3).faults[0]
    assert run(*[good.at[1, 0].set(1e-6)] * 3).faults == ("case: padded rows are not zero",)
    broken = run(*[good.at[0, 0].set(jnp.nan)] * 3)
    assert "case: relative error nan" in broken.faults
    assert np.isnan((run(good, good, good) + broken).error)


# ---- Rows ----


def test_table_leaves_missing_values_out():
    row = {
        "kernel": "expert_layer",
        "implementation": "triton",
        "tokens": 33,
        "time_us": 158.94,
        "error": None,
    }
    head, line = kernels_table.head(kernels_table.RESULTS), kernels_table.line(row, kernels_table.RESULTS)
    assert len(head.splitlines()) == 2 and {len(text) for text in head.splitlines()} == {len(line)}
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert len(kernels_table.summary([row, row | {"kernel": "expert_down"}]).splitlines()) == 3
    assert (
        cells[0] == "expert_layer" and "158.9" in cells and cells.count("") == len(kernels_table.RESULTS) - 4
    )


def test_peers_are_matched_by_size_and_the_fastest_counts():
    row = {
        "kernel": "expert_layer",
        "implementation": "triton",
        "tokens": 33,
        "context": None,
        "heads": None,
        "routing": "uniform",
        "time_us": 159.0,
    }
    plain = row | {"kernel": "expert_plain", "implementation": PLAIN, "time_us": 1500.0}
    marlin = {"kernel": "expert_layer", "tokens": 33, "peer": "Marlin", "time_us": 229.0, "kernel_us": 226.0}
    others = [marlin | {"tokens": 9, "time_us": 1.0}, marlin | {"routing": "skewed", "time_us": 2.0}]
    (first,), (second,) = kernels_peers.add_peers([[plain], [row]], [marlin, *others])
    assert "peer" not in first
    assert (second["peer"], second["peer_us"], second["peer_kernel_us"]) == ("Marlin", 229.0, 226.0)
    assert second["peers"] == {"Marlin": 229.0, PLAIN: 1500.0}
    attention = row | {"kernel": "tree_attention", "context": 2048, "heads": 8, "routing": None}
    flash = {
        "kernel": "tree_attention",
        "tokens": 33,
        "context": 2048,
        "heads": 8,
        "peer": "FlashMLA",
        "time_us": 21,
    }
    ((found,),) = kernels_peers.add_peers([[attention]], [flash, flash | {"heads": 64, "time_us": 1}])
    assert found["peer_us"] == 21


@pytest.fixture(scope="module")
def timed_rows():
    """Rows of a timed run at tiny sizes, with an invented time of every kernel and an attention size that
    fails.
    """
    asked = settings(
        check=True, on_gpu=False, tokens="3", context="128", routing_names="uniform,skewed", seed=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_expert, "PLAIN_FROM", 3)
        patch.setattr(kernels_expert, "implementations", lambda settings: ("triton",))
        patch.setattr(kernels_attention, "implementations", lambda settings: ("xla", "unheard of"))
        stub = Timing([("list", 1.0), ("expert_gate_up", 8.0), ("expert_down", 4.0), ("sum", 2.0)], 15.0)
        patch.setattr(timing, "measure", lambda call, cases: [call(*one) for one in cases] and stub)
        groups = list(kernels.measure(replace(asked, timed=True), H200, []))
    return [row for group in groups for row in group]


def test_rows_of_a_timed_run(timed_rows):
    """The layer, its parts and the plain layer by routing; numbers only; the plain layer is the peer."""
    layers = [row for row in timed_rows if row["kernel"] == "expert_layer"]
    assert [row["routing"] for row in layers] == ["uniform", "skewed"]
    for row in layers:
        assert row["error"] < 4e-3 and row["repeats_identical"] and row["chosen"] and row["time_us"] == 15.0
        assert row["peer"] == PLAIN and row["peer_us"] == 15.0
        assert (
            row["tb_s"] == pytest.approx(row["experts"] * 55_296 / 15e6, rel=0.1)
            and 0 < row["ceiling_share"] < 1
        )
    parts = [row["kernel"] for row in timed_rows if row["kernel"].startswith("expert_")]
    assert parts[:2] == ["expert_plain"] * 2
    assert parts[2:8] == [
        "expert_layer",
        "expert_work_list",
        "expert_gate_up",
        "expert_activation",
        "expert_down",
        "expert_sum",
    ]
    plain = timed_rows[0]
    assert plain["implementation"] == PLAIN and plain["error"] < 8e-3 and "failure" not in plain
    json.dumps(timed_rows, allow_nan=False)


def test_a_failing_configuration_is_a_row(timed_rows):
    attention = [row for row in timed_rows if row["kernel"] == "tree_attention"]
    assert [row["implementation"] for row in attention] == ["xla", "unheard of"]
    assert (
        "failure" not in attention[0]
        and attention[0]["error"] < 4e-3
        and attention[0]["split_merge_us"] == 0.0
    )
    assert (
        attention[1]["failure"].startswith("ValueError: implementation must be")
        and "time_us" not in attention[1]
    )


# ---- Command ----


def test_check_prints_a_table_and_one_object(command, tmp_path):
    output = tmp_path / "new" / "kernels.json"
    code, lines, errors = command(
        "--check", "--tokens", "3", "--context", "128", "--kernels", "attention", "--output", output
    )
    assert (code, errors) == (0, [])
    report = json.loads(lines[-1])
    assert report["card"] and report["rows"] == json.loads(output.read_text())["rows"]
    assert [row["implementation"] for row in report["rows"]] == ["triton", "xla"]
    assert all(row["repeats_identical"] and 0 < row["error"] < 4e-3 for row in report["rows"])
    assert sum(line.startswith("| tree_attention ") for line in lines) == 1 + 2  # the card and the results


def test_a_failed_check_ends_with_1(command, monkeypatch):
    monkeypatch.setattr(kernels_attention, "implementations", lambda settings: ("unheard of",))
    code, lines, errors = command("--check", "--tokens", "1", "--context", "128", "--kernels", "attention")
    assert code == 1 and errors[0].startswith(
        "error: 1 of 1 rows failed, first tree_attention unheard of at 1 tokens"
    )
    assert "failure" in json.loads(lines[-1])["rows"][0]


def test_needs_a_gpu(command):
    code, lines, errors = command()
    assert (code, lines) == (1, []) and "--check" in errors[0] and errors[0].startswith("error: ")
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--world", "7", "--world is 7"),
        ("--tokens", "1,x", "--tokens is '1,x'"),
        ("--tokens", "0", "--tokens is '0'"),
        ("--context", "", "--context is ''"),
        ("--heads", "-8", "--heads is '-8'"),
        ("--kernels", "expert,gate", "--kernels is 'expert,gate'"),
        ("--routing", "nowhere.json", "--routing is 'nowhere.json'"),
        ("--routing", "BAD", "--routing BAD has a row that names an expert twice"),
        ("--peers", "nowhere.json", "--peers nowhere.json cannot be read"),
        ("--peers", "BAD", "--peers BAD has a row without a proper kernel"),
        ("--output", ".", "--output . is a folder"),
    ],
)
def test_arguments_that_cannot_be_used(command, tmp_path, monkeypatch, option, value, message):
    """One line that names the option; nothing is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BAD").write_text("[[1, 1]]" if option == "--routing" else "[{}]")
    code, lines, errors = command("--check", option, value)
    assert (code, lines) == (1, []) and errors[0].startswith(f"error: {message}")
