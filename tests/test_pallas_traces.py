"""A golden trace with every kernel in Pallas, interpreted on the CPU."""

import json

import jax.numpy as jnp
import pytest
from conftest import golden_ref

from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.program import Program
from jddtree.decoding.state import Capacity

NEW_TOKENS = 24


@pytest.mark.parametrize("method, budget", [("ddtree", 7)])
def test_short_prompt_with_interpreted_kernels(pair, method, budget):
    """The shortest prompt: the ids of the reference's trace."""
    case = min(
        json.loads((golden_ref() / "traces.json").read_text())["cases"], key=lambda case: len(case["prompt"]["ids"])
    )
    capacity = Capacity(rows=8, candidates=7, context=128, rounds=8, chunk=16)
    engine = Engine(Program(pair.target, pair.drafter, capacity, "pallas"), pair.weights, jnp.dtype("float32"))
    state, controls, first, finish = engine.start([Request(case["prompt"]["ids"], NEW_TOKENS, method, budget)])
    ids = list(first[0])
    while finish[0] is None:
        state, dispatch = engine.run(state, controls)
        ids += [token for tokens in dispatch.tokens[0] for token in tokens]
        finish = dispatch.finish
    assert ids == case["tokens"][:NEW_TOKENS]
