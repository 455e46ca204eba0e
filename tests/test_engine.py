"""The compiled engine: what it refuses, admission and reuse of sequences, prompts around the chunk, broken models."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SMALL, close, decode, finish_batch, record, score_texts

from jddtree.decoding.engine import Engine, Request, check_program, check_request
from jddtree.decoding.program import Program
from jddtree.decoding.state import STOP_IDS, Capacity
from jddtree.errors import UserError

PROMPT = [1024, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "medusa"}, "method is 'medusa', but must be one of ar, chain, tree"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1] * 160}, "the prompt is 160 tokens long, but the context holds 160"),
        ({"prompt": [1, 1280]}, "token id 1280, but this target's ids are 0 to 1279"),
        ({"prompt": [1, -1]}, "token id -1"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"max_tokens": 2**31}, "--max-tokens is 2147483648, but must be 1 to 2147483647"),
        ({"budget": 9}, "the budget is 9 nodes, but the capacity of 9 rows allows 0 to 8"),
        ({"budget": -1}, "the budget is -1 nodes"),
        ({"temperature": -0.1}, "--temperature is -0.1"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_p": 1.01}, "--top-p is 1.01"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"seed": -1}, "--seed is -1"),
        ({"sequence": 2**32}, "sequence 4294967296"),
        ({"top_k_cap": 0}, "--top-k-cap is 0, but must be 1 to the 8 compiled candidates"),
        ({"top_k_cap": 9}, "--top-k-cap is 9"),
        ({"stop_ids": range(STOP_IDS + 1)}, "17 stop token ids were given, but at most 16 fit"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(pair, changes, message: str) -> None:
    request = replace(Request(PROMPT, budget=8), **changes)
    with pytest.raises(UserError) as error:
        check_request(pair.program(**SMALL), request)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_request_that_just_fits_is_taken(pair) -> None:
    program = pair.program(**SMALL)
    check_request(
        program, Request([0] * 159, 2**31 - 1, "ddtree", 8, 8, True, 0.0, 1.0, 2**32 - 1, 2**32 - 1, range(16))
    )
    check_request(program, Request([1279], method="ar", budget=1000))


def test_drafting_without_a_drafter_is_refused(pair) -> None:
    program = Program(pair.target, None, Capacity(rows=1))
    for method in ("chain", "tree"):
        with pytest.raises(UserError, match=f"method '{method}' needs a drafter"):
            check_request(program, Request(PROMPT, method=method))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 7}, "capacity is 7 rows, but a chain of block size 8 needs 8"),
        ({"candidates": 0}, "candidates per slot is 0, but must be 1 to 1280"),
        ({"candidates": 1281}, "candidates per slot is 1281"),
        ({"context": 1}, "--max-context is 1 tokens"),
        ({"context": 8193}, "--max-context is 8193 tokens, but this target takes 2 to 8192"),
        ({"sequences": 0}, "sequences is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_a_capacity_that_cannot_work_is_refused(pair, changes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_program(pair.program(**(SMALL | changes)))


def test_room_for_nodes_without_a_drafter_is_refused(pair) -> None:
    with pytest.raises(UserError, match="capacity is 40 rows without a drafter"):
        check_program(Program(pair.target, None, Capacity()))


def test_a_drafter_of_another_target_is_refused(pair) -> None:
    with pytest.raises(UserError, match="the drafter is for another target"):
        check_program(Program(pair.target, replace(pair.drafter, hidden_size=128), Capacity()))


def test_more_stop_ids_than_fit_never_reach_the_device(small) -> None:
    with pytest.raises(UserError, match="17 stop token ids"):
        small.start([Request(PROMPT, budget=8, stop_ids=range(17)), None, None, None])


def test_other_shapes_raise_instead_of_compiling(small) -> None:
    controls = small.controls([None] * 5)
    with pytest.raises(TypeError):
        small.run(small.start([None] * 4)[0], controls)


def greedy(cases, index: int, count: int = 16, **changes) -> Request:
    return Request(cases[index]["prompt"]["ids"], max_tokens=count, budget=8, **changes)


def test_prompts_around_the_chunk_size(small, pair, cases) -> None:
    """Lengths 1, chunk - 1, chunk, chunk + 1, 2 chunks, ...: caches and first token are those of one whole pass."""
    chunk, text = SMALL["chunk"], cases[9]["prompt"]["ids"]
    lengths = [
        1,
        2,
        chunk - 1,
        chunk,
        chunk + 1,
        2 * chunk - 1,
        2 * chunk,
        2 * chunk + 1,
        5 * chunk,
        6 * chunk,
        159,
        150,
    ]
    whole = score_texts(pair.target, pair.drafter, pair.weights["target"], [text])[0]
    for begin in range(0, len(lengths), SMALL["sequences"]):
        part = lengths[begin : begin + SMALL["sequences"]]
        state, _, first, _ = small.start([Request(text[:length], max_tokens=1, method="ar") for length in part])
        assert np.asarray(state.length).tolist() == part
        latents = np.asarray(state.latents)
        for b, length in enumerate(part):
            assert first[b] == [int(whole.logits[length - 1].argmax())]
            close(latents[:, b, :length], whole.latents[:, :length], f"latents of {length} tokens")
            assert not latents[:, b, length:].any()


def test_a_batch_is_each_sequence_alone(small, cases) -> None:
    requests = [
        greedy(cases, 0),
        greedy(cases, 5, method="dflash"),
        greedy(cases, 2, 3),
        greedy(cases, 9 - 5, method="ar"),
    ]
    together = decode(small, requests)
    for request, run in zip(requests, together, strict=True):
        assert finish_batch(small, [request])[0][0] == run


def test_a_second_request_does_not_see_the_first(small, cases) -> None:
    """The same sequence and the same state, admitted again: nothing of the longer request before is left."""
    (wanted,), _ = finish_batch(small, [greedy(cases, 0)])
    _, state = finish_batch(small, [greedy(cases, 5, 40), greedy(cases, 4)])
    state, controls, first, finish = small.admit(state, [greedy(cases, 0), None, None, None])
    run = wanted._replace(tokens=list(first[0]), lengths=[], nodes=[])
    while finish[0] is None:
        state, dispatch = small.run(state, controls)
        finish = dispatch.finish
        record([run], dispatch._replace(tokens=dispatch.tokens[:1], nodes=dispatch.nodes[:1]))
    assert run == wanted
    assert int(state.length[0]) == len(cases[0]["prompt"]["ids"]) + 15


def test_a_slot_is_refilled_while_its_neighbours_run(small, cases) -> None:
    """Two dispatches for four sequences, then another request in slot 1: all five texts are as decoded alone."""
    requests = [greedy(cases, index, 40) for index in (0, 1, 2, 3)]
    late = greedy(cases, 4, 24, temperature=0.8, seed=5)
    alone = decode(small, [*requests, late])
    state, controls, first, finish = small.start(requests)
    runs = [run._replace(tokens=list(tokens), lengths=[], nodes=[]) for run, tokens in zip(alone, first, strict=False)]
    assert finish == [None] * 4
    state, dispatch = small.run(state, controls)
    record(runs, dispatch)
    assert dispatch.finish == [None] * 4
    state, controls, first, finish = small.admit(state, [None, late, None, None], controls)
    assert first[0] == first[2] == first[3] == []
    cut_off, runs[1] = runs[1], alone[4]._replace(tokens=list(first[1]), lengths=[], nodes=[])
    while any(end is None for end in finish):
        state, dispatch = small.run(state, controls)
        finish = dispatch.finish
        record(runs, dispatch)
    assert runs == [alone[0], alone[4], alone[2], alone[3]]
    assert cut_off.tokens == alone[1].tokens[: len(cut_off.tokens)]


def test_idle_sequences_cost_nothing(small, cases) -> None:
    state, controls, first, finish = small.start([None, greedy(cases, 0), None, None])
    assert [len(tokens) for tokens in first] == [0, 1, 0, 0] and finish == [None] * 4
    state, dispatch = small.run(state, controls)
    assert [bool(tokens) for tokens in dispatch.tokens] == [False, True, False, False]
    assert np.asarray(state.length)[[0, 2, 3]].tolist() == [0, 0, 0]
    assert not np.asarray(state.latents)[:, 0].any()


def test_a_finished_sequence_stays_finished(small, cases) -> None:
    """Later dispatches, with whatever controls, add nothing to it and take nothing away."""
    _, state = finish_batch(small, [greedy(cases, 0, 20)])
    lengths = np.asarray(state.length).tolist()
    controls = small.controls([greedy(cases, 0, 3), None, None, None])
    state, dispatch = small.run(state, controls)
    state = small.admit(state, [None, greedy(cases, 1), None, None], controls)[0]
    state, dispatch = small.run(state, small.controls([greedy(cases, 0, 3), greedy(cases, 1), None, None]))
    assert dispatch.tokens[0] == [] and int(state.length[0]) == lengths[0] and dispatch.finish[0] == "length"
    assert dispatch.tokens[1]


def test_lowering_the_limit_between_dispatches_ends_a_sequence(small, cases) -> None:
    state, controls, _, _ = small.start([greedy(cases, 0, 40), None, None, None])
    state, dispatch = small.run(state, controls)
    length = int(state.length[0])
    state, dispatch = small.run(state, controls._replace(max_tokens=np.full(4, 2, np.int32)))
    assert dispatch.tokens[0] == [] and dispatch.finish[0] == "length" and int(state.length[0]) == length


def with_weights(engine: Engine, **changed) -> Engine:
    """The same compiled functions over other weights."""
    other = copy.copy(engine)
    other.weights = engine.weights | changed
    return other


@pytest.mark.parametrize("kind", ["random", "zero", "nan", "huge"])
def test_the_text_does_not_depend_on_the_drafter(small, cases, kind: str) -> None:
    """A drafter may be useless or broken; it costs rounds, never a token. This also forces rejections."""
    random = np.random.default_rng(0)
    make = {
        "random": lambda array: random.standard_normal(array.shape) * 0.05,
        "zero": lambda array: np.zeros(array.shape),
        "nan": lambda array: np.full(array.shape, np.nan),
        "huge": lambda array: np.full(array.shape, 3e38),
    }[kind]
    drafter = jax.tree.map(lambda array: jnp.asarray(make(array), array.dtype), small.weights["drafter"])
    requests = [greedy(cases, 0), greedy(cases, 1, method="dflash"), greedy(cases, 2, spine=True), greedy(cases, 3)]
    wanted = decode(small, [replace(request, method="ar") for request in requests])
    found = decode(with_weights(small, drafter=drafter), requests)
    assert [run.tokens for run in found] == [run.tokens for run in wanted]


def test_non_finite_logits_are_reported(small, cases) -> None:
    """In the prefill and in a round: an error, never a token."""
    broken = dict(small.weights["target"])
    broken["norm"] = jnp.full_like(broken["norm"], jnp.nan)
    bad = with_weights(small, target=broken)
    with pytest.raises(UserError, match="logits are not finite in sequence 1"):
        bad.start([None, greedy(cases, 0), None, None])
    state, controls, _, _ = small.start([None, None, greedy(cases, 0), None])
    with pytest.raises(UserError, match="not finite in sequence 2"):
        bad.run(state, controls)


def test_a_target_alone(pair, cases) -> None:
    """Without a drafter the engine is one row wide and writes the same text."""
    program = Program(pair.target, None, Capacity(sequences=2, rows=1, context=160, rounds=8, chunk=16))
    engine = Engine(program, {"target": pair.weights["target"]}, pair.dtype)
    runs = decode(engine, [greedy(cases, 0, method="ar"), greedy(cases, 1, method="ar")])
    assert [run.tokens for run in runs] == [cases[0]["tokens"][:16], cases[1]["tokens"][:16]]
    assert runs[0].lengths == [1] * 15 and runs[0].nodes == [0] * 15
