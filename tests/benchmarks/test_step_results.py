"""What is made of measured rows: parts of a pass, its picture, eight cards, tables; decoding with a scripted
engine.
"""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jddtree.benchmarks.decoding import dispatches as decode
from jddtree.benchmarks.step.account import extrapolation, waterfall
from jddtree.benchmarks.step.account import floor as step_floor
from jddtree.benchmarks.step.account import tables as step_table
from jddtree.benchmarks.step.rank import presets as step_presets
from jddtree.decoding.engine import Dispatch, Engine
from jddtree.errors import UserError

BFLOAT16 = jnp.dtype("bfloat16")


# ---- Results ----


def measured(tokens, context, touched, time_ms):
    """Rows of a verify pass as `bench step` writes them; kernels take what the clock shows but for 0.5 ms."""
    models = step_presets.models("kimi-k2.6")
    parts = step_floor.stage_bytes(models, 8, BFLOAT16, touched, context)["verify"]
    size = {"tokens": tokens, "context": context, "routing": "uniform"}
    floor = step_floor.floor_ms(parts)
    kernels = {
        "experts gate_up": 1e3 * (time_ms - 1.5),
        "router + shared": 600.0,
        "attention split": 300.0,
        "x": 100.0,
    }
    return [
        size
        | {"stage": "roofline", "floor_of": "verify", "floor_ms": floor}
        | {"megabytes": {name: number / 1e6 for name, number in parts.items()}},
        size
        | {
            "stage": "verify",
            "time_ms": time_ms,
            "floor_ms": floor,
            "ratio": time_ms / floor,
            "kernels": kernels,
        },
    ]


def test_the_parts_of_a_pass_add_up():
    """To the wall clock's time; floors are those of the bytes, and what has no bytes has none."""
    rows = measured(33, 4096, 193, 14.0)
    found = {row["part"]: row for row in waterfall.parts(rows, 33, 4096)}
    assert sum(row["ms"] for row in found.values()) == pytest.approx(14.0)
    assert sum(row["percent"] for row in found.values()) == pytest.approx(100)
    assert (
        found["between kernels"]["ms"] == pytest.approx(0.5) and found["between kernels"]["floor_ms"] is None
    )
    assert found["other"]["ms"] == pytest.approx(0.1) and found["router and shared expert"]["ms"] == 0.6
    size = rows[0]["megabytes"]
    assert found["other"]["floor_ms"] == pytest.approx(
        (size["dense"] + size["head"]) * 1e9 / step_floor.PEER_RATE
    )
    latents = size["latents"] * 1e9 / step_floor.PEER_RATE
    floors = sum(row["floor_ms"] or 0 for row in found.values())
    assert floors - latents == pytest.approx(rows[1]["floor_ms"])
    with pytest.raises(UserError, match="no verify of 9 tokens"):
        waterfall.parts(rows, 9, 4096)
    with pytest.raises(UserError, match="both clocks"):
        del rows[1]["kernels"]
        waterfall.parts(rows, 33, 4096)


def test_the_picture_is_drawn(tmp_path):
    """A PNG from a results file; one line for a file that holds something else."""
    results, picture = tmp_path / "step.json", tmp_path / "pictures" / "step.png"
    results.write_text(json.dumps({"card": "a card", "rows": measured(33, 4096, 193, 14.0)}))
    assert waterfall.main([str(results), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    results.write_text("[]")
    assert waterfall.main([str(results), str(picture)]) == 1


def test_eight_cards_cost_a_rank_and_its_sums():
    """On the same card the pass and 123 sums, interpolated by rows; on a slower one the floor grows."""
    rows = [*measured(1, 4096, 8, 3.6), *measured(17, 4096, 115, 9.0), *measured(33, 32768, 193, 15.0)]
    mesh = [
        {"part": "sum", "form": "psum_f32", "rows": rows, "less_glue_us": us}
        for rows, us in ((1, 20.0), (33, 30.0))
    ]
    same, slower = (extrapolation.rows(rows, mesh, card) for card in extrapolation.CARDS)
    assert [row["tokens"] for row in same] == [1, 17]
    assert same[0]["sums_ms"] == pytest.approx(123 * 0.020) and same[1]["sums_ms"] == pytest.approx(
        123 * 0.025
    )
    assert same[1]["least_ms"] == same[1]["most_ms"] == pytest.approx(9.0 + 123 * 0.025)
    assert slower[1]["floor_ms"] == pytest.approx(same[1]["floor_ms"] * 4.3 / 1.79)
    assert same[1]["most_ms"] < slower[1]["least_ms"] < slower[1]["most_ms"]


def test_tables_of_the_results():
    """A line for each row that was timed; one column of bytes for each number of tokens."""
    rows = [*measured(1, 4096, 8, 3.6), *measured(33, 4096, 193, 14.0)]
    assert [line.split("|")[2].strip() for line in step_table.stages(rows).splitlines()[2:]] == ["1", "33"]
    heading, _, *lines = step_table.roofline(rows).splitlines()
    assert "1 token " in heading and "33 tokens" in heading and lines[-1].split("|")[2].strip() == "1.5"
    assert len(step_table.parts(rows, 33, 4096).splitlines()) == 2 + 7


def test_a_pass_beside_the_composed_one():
    """Three sizes joined by number of rows, and how many times as fast; a size that was not measured is an
    error.
    """
    rows = [
        row
        for tokens, touched in ((33, 193), (1, 8), (9, 66))
        for row in measured(tokens, 4096, touched, 10.0)
    ]
    size = {"stage": "verify", "context": 4096, "routing": "uniform"}
    peers = [
        size | {"tokens": tokens, "time_ms": time} for tokens, time in ((1, 25.0), (9, 20.0), (33, 30.0))
    ]
    _, _, *lines, empty, said = step_table.beside_peer(rows, peers).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["1", "10.00", "25.00", "2.50"],
        ["9", "10.00", "20.00", "2.00"],
        ["33", "10.00", "30.00", "3.00"],
    ]
    assert not empty and "2.0 to 3.0 times as fast" in said
    with pytest.raises(UserError, match="no verify of 9 tokens"):
        step_table.beside_peer(rows, [peers[0], peers[2]])


def test_the_short_table_of_stages():
    """What was timed at the shortest context with uniform routing, and no ceilings."""
    zipf = measured(9, 4096, 66, 8.0)[1] | {"routing": "zipf"}
    ceiling = {"stage": "ceiling", "time_us": 1.0}
    rows = [ceiling, *measured(33, 131072, 193, 24.0), *measured(33, 4096, 193, 14.0), zipf]
    (line,) = step_table.shortest(rows).splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")][1:4] == ["verify", "33", "4096"]


# ---- Decoding ----


class ScriptedEngine:
    """Emits three tokens a round until fourteen are there; each used 8 nodes and was to give 2.5 tokens."""

    def __init__(self, rounds):
        self.program = SimpleNamespace(capacity=SimpleNamespace(rounds=rounds))
        self.compile_seconds = 0.0

    def start(self, requests):
        return 1, None, [[0]], [None]

    def run(self, state, controls):
        tokens = []
        while state < 14 and len(tokens) < self.program.capacity.rounds:
            tokens.append([state, state + 1, state + 2][: 14 - state])
            state += 3
        many, finish = len(tokens), None if state < 14 else "length"
        return state, Dispatch([tokens], [[8] * many], [[(2.5, 0.0)] * many], [finish])

    decode = Engine.decode


def test_decoding_counts_tokens_rounds_and_gaps():
    """Thirteen tokens after the first in five rounds; the same ones whatever a dispatch holds."""
    rows = decode.measure([[1], [2]], 14, 8, iter([(count, ScriptedEngine(count)) for count in (1, 2)]))
    assert [row["rounds"] for row in rows] == [10, 10] and all(row["same_tokens"] for row in rows)
    assert rows[0]["acceptance_length"] == rows[0]["tokens_per_round"] == pytest.approx(2.6)
    assert (rows[0]["nodes_per_round"], rows[0]["expected_tokens_per_round"]) == (8, 2.5)
    assert rows[0]["expected_tokens_per_s"] is None  # no cost table
    with pytest.raises(UserError, match="no dispatch ran all its 6 rounds"):
        decode.measure([[1]], 14, 8, iter([(6, ScriptedEngine(6))]))


def test_tokens_of_a_mesh_are_compared_with_those_of_one_device():
    """The first token that differs, by prompt and place; texts of other lengths differ where the shorter one
    ends.
    """
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=8))
    same = decode._compared(mesh, [[1, 2], [3]], [[1, 2], [3]])
    assert same == {"mesh": 8, "same_as_one_device": True, "first_difference": None}
    assert decode._compared(mesh, [[1, 2], [3]], [[1, 2], [3, 4]])["first_difference"] == [1, 1]
    assert decode._compared(mesh, [[1, 5], [3]], [[1, 2], [3]])["first_difference"] == [0, 1]
    rows = decode.measure([[1]], 14, 8, iter([(count, ScriptedEngine(count)) for count in (1, 2)]))
    assert "mesh" not in rows[0]


def test_a_gap_is_what_a_dispatch_of_no_rounds_would_take():
    """Dispatches of 2 ms a round and 0.5 ms between."""
    rows = [{"rounds_per_dispatch": count, "dispatch_ms": 2 * count + 0.5} for count in (1, 4, 8)]
    found = decode.with_gaps(rows)
    assert found[2]["round_ms"] == pytest.approx(2) and found[2]["gap_ms"] == pytest.approx(0.5)
    assert found[2]["gap_percent"] == pytest.approx(100 * 0.5 / 16.5)
