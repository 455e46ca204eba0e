"""Third-party decoding traces: the same tokens, and the same number of them in every round, for every
method.
"""

import pytest
from harness import Run, decode

from jddtree.decoding.engine import Request

DECODERS = ("ar", "dflash", "ddtree_8", "ddtree_16", "ddtree_32", "ddtree_64")
TOKENS = 96  # of a reference trace that no stop token ended; its last round may run past them
CASES = 14


def request_of(case, decoder: str) -> Request:
    """One token more than the trace has, so that its last round is seen even where it ends exactly there."""
    method, _, budget = decoder.partition("_")
    ids = case["prompt"]["ids"]
    return Request(
        ids, max_tokens=TOKENS + 1, method=method, budget=int(budget or 0), stop_ids=case["stop_ids"]
    )


def reference_lengths(case, decoder: str) -> list[int]:
    decoded = case["decoders"][decoder]
    return decoded.get("lengths", [1] * decoded["rounds"])


def width(engine, decoder: str) -> int:
    """The rows of the smallest compiled round that holds a decoder's trees."""
    capacity, budget = engine.program.capacity, int(decoder.partition("_")[2] or 0)
    rows = {"ar": 1, "dflash": engine.program.block}.get(decoder, budget + 1)
    return min(width for width in (*capacity.widths, capacity.rows) if width >= rows)


@pytest.fixture(scope="module")
def runs(wide, cases) -> dict[tuple[int, str], Run]:
    """All traces through one engine. Sequences of the same compiled width and about equally many rounds share
    a batch, so it mixes the methods and no round is wider than one of them needs.
    """
    engine, _ = wide
    jobs = [(index, decoder) for index in range(len(cases)) for decoder in DECODERS]
    jobs.sort(key=lambda job: (width(engine, job[1]), len(reference_lengths(cases[job[0]], job[1]))))
    found = decode(engine, [request_of(cases[index], decoder) for index, decoder in jobs])
    return dict(zip(jobs, found, strict=True))


def test_all_cases_are_here(cases) -> None:
    assert len(cases) == CASES and all(set(DECODERS) == set(case["decoders"]) for case in cases)


@pytest.mark.parametrize("index", range(CASES))
@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_are_the_reference(runs, cases, index: int, decoder: str) -> None:
    run, wanted = runs[index, decoder], cases[index]["tokens"]
    assert run.tokens[:TOKENS] == wanted
    stopped = len(wanted) < TOKENS
    assert (run.finish, len(run.tokens)) == (("stop", len(wanted)) if stopped else ("length", TOKENS + 1))


@pytest.mark.parametrize("index", range(CASES))
@pytest.mark.parametrize("decoder", DECODERS)
def test_tokens_per_round_are_the_reference(runs, cases, index: int, decoder: str) -> None:
    run, wanted = runs[index, decoder], reference_lengths(cases[index], decoder)
    assert run.lengths[:-1] == wanted[:-1] and len(run.lengths) == len(wanted)
    assert 0 < run.lengths[-1] <= wanted[-1]  # ours may be cut at the limit


@pytest.mark.parametrize("decoder", DECODERS[1:])
def test_nodes_per_round_are_the_reference(runs, cases, decoder: str) -> None:
    for index, case in enumerate(cases):
        rounds = len(reference_lengths(case, decoder))
        trees = case["decoders"][decoder].get("trees")
        wanted = [len(tree["tokens"]) for tree in trees] if trees else [7] * rounds
        assert runs[index, decoder].nodes == wanted


def test_larger_trees_need_fewer_rounds(runs) -> None:
    totals = [sum(len(runs[index, decoder].lengths) for index in range(CASES - 2)) for decoder in DECODERS]
    assert totals == sorted(totals, reverse=True) and totals[0] > 3 * totals[-1]
