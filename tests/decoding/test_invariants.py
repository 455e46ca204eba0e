"""The seven invariants of the design, and for each what its test says when the invariant is broken on
purpose.
"""

import copy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SMALL, close, compilations, decode, finish_batch

import jddtree.decoding.engine as engine_module
import jddtree.decoding.sampling as sampling_module
import pallas_kernels.attention.api as attention_module
from jddtree.decoding import rounds, stages
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.requests import controls_of
from jddtree.decoding.state import RUNNING, Capacity, State, initial_state
from jddtree.decoding.tree import Shape, build, lattice

STORY = SMALL | {"rows": 33, "candidates": 8, "rounds": 1, "chunk": 24}
SEQUENCES = SMALL["sequences"]
COUNT = 24


def request(cases, index: int, **changes) -> Request:
    return Request(cases[index]["prompt"]["ids"], **({"max_tokens": COUNT, "budget": 8} | changes))


def rebuilt(engine: Engine) -> Engine:
    """The engine with its rounds compiled again, from code that a test has changed."""
    other = copy.copy(engine)
    function = jax.jit(partial(rounds.run_rounds, engine.program), donate_argnums=1)
    lowered = function.lower(engine.weights, engine.abstract_state(), engine.abstract_controls())
    # It runs for a moment only.
    other._rounds = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return other


# 1. No shape depends on data.


def check_nothing_compiles(engine: Engine, cases) -> None:
    """After a warm-up: any prompt length, budget, method, sampling, acceptance and stop position."""
    text = cases[9]["prompt"]["ids"]
    decode(engine, [request(cases, 0)])
    with compilations() as events:
        jobs = [
            Request(text[:length], max_tokens=3 + length % 5, budget=length % 9)
            for length in (1, 2, 15, 16, 17, 40)
        ]
        jobs += [request(cases, 1, method=method) for method in ("ar", "dflash")]
        jobs += [request(cases, 2, temperature=0.7, top_p=0.9, seed=4, spine=True, top_k_cap=3)]
        jobs += [request(cases, 3, stop_ids=[token]) for token in cases[3]["tokens"][:3]]
        decode(engine, jobs)
    assert events == []


def test_invariant_1_no_shape_depends_on_data(small, cases) -> None:
    check_nothing_compiles(small, cases)


def test_invariant_1_breaks_when_the_host_touches_the_device_with_data_shapes(
    small, cases, monkeypatch
) -> None:
    next_chunk = Engine._chunk

    def counting_on_the_device(self, prompts):
        for one in prompts:
            jnp.asarray(np.array(one, np.int32)).sum()
        return next_chunk(self, prompts)

    monkeypatch.setattr(Engine, "_chunk", counting_on_the_device)
    with pytest.raises(AssertionError):
        check_nothing_compiles(small, cases)


def test_every_budget_from_0_to_64_under_one_compilation(wide, cases) -> None:
    """The empty state, prefill and rounds compiled once; 65 budgets in mixed batches, nothing more; one
    text.
    """
    engine, made = wide
    assert len(made) == 3, made
    wanted = cases[1]["tokens"][:9]
    jobs = [request(cases, 1, max_tokens=9, budget=budget) for budget in range(65)]
    decode(engine, jobs[:1])
    with compilations() as events:
        runs = decode(engine, jobs)
    assert events == []
    assert [run.tokens for run in runs] == [wanted] * 65
    for budget, run in enumerate(runs):
        assert all(nodes == budget for nodes in run.nodes)
    assert len(runs[64].lengths) <= len(runs[8].lengths) < len(runs[0].lengths) == 8


# 2. Block rows and tree rows are separate constants.


def test_block_8_budget_32_candidate_cap_8_is_the_default_and_has_33_rows(engines, pair, cases) -> None:
    """The story's crash: a draft block of 8 rows and a tree of 33 met in one captured shape."""
    engine = engines(**STORY)
    assert (pair.drafter.block_size, engine.program.capacity.rows, engine.program.capacity.candidates) == (
        8,
        33,
        8,
    )
    runs = decode(engine, [request(cases, index, budget=32, top_k_cap=8) for index in range(4)])
    assert [run.tokens for run in runs] == [case["tokens"][:COUNT] for case in cases[:4]]
    assert all(nodes == 32 for run in runs for nodes in run.nodes)
    assert max(length for run in runs for length in run.lengths) > 3


def traced(pair, block: int, fields: dict[str, int]) -> jax.Array:
    """The shape of what a dispatch returns, from tracing alone."""
    program = Program(pair.target, replace(pair.drafter, block_size=block), Capacity(**fields))
    state = jax.eval_shape(
        lambda: initial_state(program.target, program.drafter, program.capacity, jnp.float32)
    )
    controls = controls_of(program, [None] * program.capacity.sequences)
    return jax.eval_shape(partial(rounds.run_rounds, program), pair.weights, state, controls)[1]


def check_separate_constants(pair) -> None:
    for block, rows, candidates in (
        (8, 33, 8),
        (8, 8, 7),
        (2, 33, 32),
        (16, 33, 8),
        (16, 65, 64),
        (5, 40, 3),
    ):
        fields = {"sequences": 2, "rows": rows, "candidates": candidates, "context": 64, "rounds": 3}
        assert traced(pair, block, fields).shape == (3 * 2 * (block + 4) + 3 * 2,)


def test_invariant_2_block_rows_and_tree_rows_are_separate_constants(pair) -> None:
    check_separate_constants(pair)


def test_invariant_2_breaks_when_one_constant_serves_both(pair, monkeypatch) -> None:
    monkeypatch.setattr(Program, "block", property(lambda self: self.capacity.rows))
    with pytest.raises((AssertionError, TypeError, ValueError)):
        check_separate_constants(pair)


# 3. The cache holds committed tokens only.


def caches(state: State, sequence: int, begin: int, end: int | None = None) -> list[np.ndarray]:
    """Latents, keys and values of some positions of a sequence."""
    return [np.asarray(cache)[:, sequence, begin:end] for cache in (state.latents, *state.draft)]


def check_like_a_fresh_prefill(engine: Engine, state: State, texts) -> None:
    """Every sequence's caches hold exactly its text without the last token, as a prefill of it writes them.

    Positions past the text still hold the zeros that they began with.
    """
    jobs = [Request(text[:-1], max_tokens=1, method="ar") for text in texts]
    fresh = engine.start([*jobs, *[None] * (SEQUENCES - len(jobs))])[0]
    for sequence, text in enumerate(texts):
        length = len(text) - 1
        assert int(state.length[sequence]) == int(fresh.length[sequence]) == length
        assert int(state.root[sequence]) == text[-1]
        for found, wanted in zip(
            caches(state, sequence, 0, length), caches(fresh, sequence, 0, length), strict=True
        ):
            close(found, wanted, f"cache of sequence {sequence}")
        assert not any(tail.any() for tail in caches(state, sequence, length)), (
            f"sequence {sequence} wrote too much"
        )


def check_only_committed_rows(engine: Engine, prefilled: Engine, cases) -> None:
    """After every dispatch, with trees of which most nodes are rejected."""
    jobs = [
        request(cases, 0),
        request(cases, 1, method="dflash"),
        request(cases, 2, budget=5),
        request(cases, 3, spine=True),
    ]
    state, controls, first, finish = engine.start(jobs)
    texts = [[*job.prompt, *tokens] for job, tokens in zip(jobs, first, strict=True)]
    rejected = 0
    while any(end is None for end in finish):
        state, dispatch = engine.run(state, controls)
        finish = dispatch.finish
        for text, emitted, nodes in zip(texts, dispatch.tokens, dispatch.nodes, strict=True):
            text.extend(token for tokens in emitted for token in tokens)
            rejected += sum(nodes) - sum(len(tokens) - 1 for tokens in emitted)
        check_like_a_fresh_prefill(prefilled, state, texts)
    assert rejected > 50


def test_invariant_3_the_cache_holds_committed_tokens_only(small, cases) -> None:
    check_only_committed_rows(small, small, cases)


def test_invariant_3_breaks_when_rejected_rows_are_written(small, cases, monkeypatch) -> None:
    append = stages.append_rows
    everything = lambda cache, rows, start, count: append(
        cache, rows, start, jnp.full_like(count, rows.shape[2])
    )
    monkeypatch.setattr(stages, "append_rows", everything)
    with pytest.raises(AssertionError, match="wrote too much"):
        check_only_committed_rows(rebuilt(small), small, cases)


# 4. The token at a position depends on prompt, seed and position alone.


def check_same_tokens(engine: Engine, plain: Engine, cases, **options) -> None:
    """For every method and budget, beside different neighbours."""
    jobs = [request(cases, 0, method="ar", **options), request(cases, 0, method="dflash", **options)]
    jobs += [request(cases, 0, budget=budget, **options) for budget in (0, 1, 4, 8)]
    jobs.insert(1, request(cases, 4))
    wanted = decode(plain, jobs[:1])[0].tokens
    found = [
        run.tokens
        for job, run in zip(jobs, decode(engine, jobs), strict=True)
        if job.prompt == jobs[0].prompt
    ]
    assert found == [wanted] * (len(jobs) - 1)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "sampled"])
def test_invariant_4_a_token_depends_on_prompt_seed_and_position_alone(
    small, engines, cases, options
) -> None:
    check_same_tokens(small, small, cases, **options)
    check_same_tokens(engines(**STORY), small, cases, **options)


def test_invariant_4_breaks_when_noise_belongs_to_tree_rows(small, cases, monkeypatch) -> None:
    noise = sampling_module.noise

    def by_row(positions, sampling, vocabulary):
        rows = jnp.broadcast_to(jnp.arange(positions.shape[1], dtype=jnp.int32)[None], positions.shape)
        return noise(rows, sampling, vocabulary)

    monkeypatch.setattr(sampling_module, "noise", by_row)
    broken = rebuilt(small)
    check_same_tokens(broken, small, cases)
    with pytest.raises(AssertionError):
        check_same_tokens(broken, broken, cases, temperature=0.8, seed=7, max_tokens=12)


def test_invariant_4_breaks_when_the_walk_accepts_without_a_match(small, cases, monkeypatch) -> None:
    """As a walk would that always takes the likeliest child."""
    walk = stages.walk

    def eager(tree, choices, block):
        children = tree.parents[:, None, :] == jnp.arange(tree.parents.shape[1])[None, :, None]
        drafted = jnp.take_along_axis(tree.tokens, jnp.argmax(children, axis=2), axis=1)
        return walk(tree, jnp.where(children.any(2), drafted, choices), block)

    monkeypatch.setattr(stages, "walk", eager)
    with pytest.raises(AssertionError):
        check_same_tokens(rebuilt(small), small, cases)


# 5. Padding never leaks.


def poisoned(state: State) -> State:
    """NaN in every cache entry that holds no committed token."""

    def fill(cache):
        tail = np.arange(cache.shape[2])[None] >= np.asarray(state.length)[:, None]
        cache = np.array(cache)
        cache[:, tail] = np.nan
        return jax.device_put(cache)

    rest = jax.tree.map(
        lambda array: jax.device_put(np.array(array)), state._replace(latents=None, draft=None)
    )
    return rest._replace(latents=fill(state.latents), draft=jax.tree.map(fill, state.draft))


def check_nan_changes_nothing(engine: Engine, cases) -> None:
    """Bit by bit, over whole texts, with sequences of different lengths and an idle one."""
    jobs = [
        request(cases, 0),
        request(cases, 5, method="dflash", max_tokens=9),
        None,
        request(cases, 4, temperature=0.8),
    ]
    clean, controls, _, finish = engine.start(jobs)
    dirty = engine.start(jobs)[0]
    while any(end is None for job, end in zip(jobs, finish, strict=True) if job):
        clean, wanted = engine.run(clean, controls)
        dirty, found = engine.run(poisoned(dirty), controls)
        finish = wanted.finish
        assert found == wanted
        for sequence, length in enumerate(np.asarray(clean.length)):
            pairs = zip(caches(dirty, sequence, 0, length), caches(clean, sequence, 0, length), strict=True)
            assert all(np.array_equal(one, other) for one, other in pairs)


def test_invariant_5_padding_never_leaks(small, cases) -> None:
    check_nan_changes_nothing(small, cases)


def test_invariant_5_breaks_when_attention_reads_past_the_length(small, cases, monkeypatch) -> None:
    attention = attention_module.tree_attention

    def whole_cache(queries, cache, layer, lengths, *rest, **options):
        return attention(queries, cache, layer, jnp.full_like(lengths, cache.shape[2]), *rest, **options)

    monkeypatch.setattr(attention_module, "tree_attention", whole_cache)
    broken = rebuilt(small)
    with pytest.raises((AssertionError, engine_module.UserError)):
        check_nan_changes_nothing(broken, cases)


def test_invariant_5_prefill_over_a_dirty_cache_and_dirty_chunk_padding(small, cases, monkeypatch) -> None:
    """A new request on a state full of NaN, with arbitrary ids in the padding of its chunks: the same, bit by
    bit.
    """
    jobs = [request(cases, index) for index in (0, 1, 4, 9 - 1)]
    wanted, clean = finish_batch(small, jobs)
    next_chunk = Engine._chunk

    def dirty_chunk(self, prompts):
        chunk = next_chunk(self, prompts)
        padding = np.arange(chunk.tokens.shape[1])[None] >= np.asarray(chunk.counts)[:, None]
        return chunk._replace(tokens=np.where(padding, np.int32(10**6), chunk.tokens))

    monkeypatch.setattr(Engine, "_chunk", dirty_chunk)
    empty = jax.tree.map(
        lambda spec: jax.device_put(np.zeros(spec.shape, spec.dtype)), small.abstract_state()
    )
    monkeypatch.setattr(Engine, "empty_state", lambda self: poisoned(empty))
    found, dirty = finish_batch(small, jobs)
    assert found == wanted
    for sequence, length in enumerate(np.asarray(clean.length)):
        pairs = zip(caches(dirty, sequence, 0, length), caches(clean, sequence, 0, length), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)


def test_invariant_5_candidates_past_the_cap_are_never_read(cases) -> None:
    random = np.random.default_rng(0)
    log_probs = np.sort(-random.random((2, 7, 8)), axis=-1)[..., ::-1].astype(np.float32)
    ids = random.integers(0, 100, (2, 7, 8)).astype(np.int32)
    shape = Shape(np.full(2, 20, np.int32), np.array([3, 8], np.int32), np.zeros(2, bool))
    make = jax.jit(
        lambda log_probs, ids: build(jnp.zeros(2, jnp.int32), log_probs, ids, shape, lattice(7, 20, 8), 40)
    )
    dirty_probs, dirty_ids = log_probs.copy(), ids.copy()
    dirty_probs[0, :, 3:], dirty_ids[0, :, 3:] = np.nan, -7
    for one, other in zip(make(log_probs, ids), make(dirty_probs, dirty_ids), strict=True):
        assert np.array_equal(one, other)


# 6. Lengths live on the device.


def check_lengths_are_read_on_the_device(engine: Engine, plain: Engine, cases) -> None:
    """Setting the length in the state is all that a rewind takes: the text goes on from there as it did
    before.
    """
    jobs = [request(cases, index) for index in range(SEQUENCES)]
    runs, state = finish_batch(plain, jobs)
    for kept in (1, 6, 11):
        lengths = np.array([len(job.prompt) + kept - 1 for job in jobs], np.int32)
        roots = np.array([run.tokens[kept - 1] for run in runs], np.int32)
        back = jax.tree.map(lambda array: jax.device_put(np.array(array)), state)._replace(
            root=jax.device_put(roots),
            length=jax.device_put(lengths),
            emitted=jax.device_put(np.full(SEQUENCES, kept, np.int32)),
            finish=jax.device_put(np.full(SEQUENCES, RUNNING, np.int32)),
        )
        texts, finish = [[] for _ in jobs], [None]
        while any(end is None for end in finish):
            back, dispatch = engine.run(back, engine.controls(jobs))
            finish = dispatch.finish
            for text, emitted in zip(texts, dispatch.tokens, strict=True):
                text.extend(token for tokens in emitted for token in tokens)
        assert texts == [run.tokens[kept:] for run in runs]


def test_invariant_6_lengths_live_on_the_device(small, cases) -> None:
    check_lengths_are_read_on_the_device(small, small, cases)


def test_invariant_6_breaks_when_a_length_is_captured(small, cases, monkeypatch) -> None:
    """As in an engine that froze the key count of the prefill into its graph."""
    attention, captured = (
        attention_module.tree_attention,
        [len(case["prompt"]["ids"]) for case in cases[:SEQUENCES]],
    )

    def frozen(queries, cache, layer, lengths, *rest, **options):
        return attention(queries, cache, layer, jnp.array(captured, jnp.int32), *rest, **options)

    monkeypatch.setattr(attention_module, "tree_attention", frozen)
    broken = rebuilt(small)
    with pytest.raises(AssertionError):
        check_lengths_are_read_on_the_device(broken, small, cases)


# 7. A stop token, the length limit or the context end may fall on any slot.


def check_every_cut(engine: Engine, prefilled: Engine, jobs, wanted) -> set[int]:
    """Each job ends as `wanted` (tokens, reason) says, with caches as after a prefill; returns the ends'
    slots.
    """
    slots = set()
    for begin in range(0, len(jobs), SEQUENCES):
        part = slice(begin, begin + SEQUENCES)
        runs, state = finish_batch(engine, jobs[part])
        for run, (tokens, reason) in zip(runs, wanted[part], strict=True):
            assert (run.tokens, run.finish) == (tokens, reason)
            assert 1 + sum(run.lengths) == len(tokens)
            slots.add(run.lengths[-1] if run.lengths else 0)
        check_like_a_fresh_prefill(
            prefilled, state, [[*job.prompt, *run.tokens] for job, run in zip(jobs[part], runs, strict=True)]
        )
        assert np.asarray(state.emitted)[: len(runs)].tolist() == [len(run.tokens) for run in runs]
    return slots


def stop_jobs(cases):
    """Every token of four traces as the stop token in turn, the first one included."""
    jobs, wanted = [], []
    for index in (0, 1, 3, 4):
        tokens = cases[index]["tokens"][:COUNT]
        for token in dict.fromkeys(tokens):
            jobs.append(request(cases, index, stop_ids=[1279, token], max_tokens=96))
            wanted.append((tokens[: tokens.index(token) + 1], "stop"))
    return jobs, wanted


def test_invariant_7_a_stop_token_may_fall_on_any_slot(small, cases) -> None:
    slots = check_every_cut(small, small, *stop_jobs(cases))
    assert {0, 1, 2, 3, 4} <= slots  # 0: the prefill's token


def test_invariant_7_the_length_limit_may_fall_on_any_slot(small, cases) -> None:
    jobs = [request(cases, index, max_tokens=count) for index in (1, 4) for count in range(1, 17)]
    wanted = [(cases[index]["tokens"][:count], "length") for index in (1, 4) for count in range(1, 17)]
    assert {0, 1, 2, 3, 4} <= check_every_cut(small, small, jobs, wanted)


def test_invariant_7_the_context_end_may_fall_on_any_slot(small, wide, cases) -> None:
    """Prompts that leave room for 1 to 12 tokens; the wide engine, with more context, says how the text goes
    on.
    """
    context, text = SMALL["context"], cases[9]["prompt"]["ids"]
    prompts = [text[: context - room] for room in range(1, 13)]
    longer = decode(wide[0], [Request(prompt, max_tokens=12, budget=64) for prompt in prompts])
    jobs = [Request(prompt, max_tokens=96, budget=8) for prompt in prompts]
    wanted = [(run.tokens[:room], "context") for room, run in enumerate(longer, 1)]
    assert len(check_every_cut(small, small, jobs, wanted)) > 2


def test_invariant_7_the_first_of_two_reasons_counts(small, cases) -> None:
    tokens = cases[0]["tokens"][:4]
    both = request(cases, 0, max_tokens=4, stop_ids=[tokens[3]])
    assert tokens.index(tokens[3]) == 3
    assert decode(small, [both])[0].finish == "stop"


def test_invariant_7_breaks_when_only_the_bonus_is_scanned(small, cases, monkeypatch) -> None:
    cut = stages.cut

    def last_only(program, state, controls, tokens, accepted):
        last = jnp.arange(tokens.shape[1])[None] == accepted[:, None] - 1
        return cut(program, state, controls, jnp.where(last, tokens, -2), accepted)

    monkeypatch.setattr(stages, "cut", last_only)
    with pytest.raises(AssertionError):
        check_every_cut(rebuilt(small), small, *stop_jobs(cases))


def test_invariant_7_breaks_when_accepted_rows_after_a_stop_are_committed(small, cases, monkeypatch) -> None:
    cut = stages.cut

    def finish_only(program, state, controls, tokens, accepted):
        return accepted, cut(program, state, controls, tokens, accepted)[1]

    monkeypatch.setattr(stages, "cut", finish_only)
    with pytest.raises(AssertionError):
        check_every_cut(rebuilt(small), small, *stop_jobs(cases))
