"""bfloat16 along the reference traces: no further from float32 than the third-party bfloat16 run."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import golden_ref, micro_drafter, micro_target
from harness import decode, load_pair, score_texts

from jddtree.decoding.engine import Request
from jddtree.decoding.state import Capacity


@pytest.fixture(scope="module")
def half_pair():
    """The micro pair in bfloat16."""
    return load_pair(micro_target(), micro_drafter(), ml_dtypes.bfloat16)


def log_probabilities(pair, cases) -> np.ndarray:
    """float32 [positions, V]: what the model says at each token of the traces, teacher-forced in one pass per text."""
    texts = [case["prompt"]["ids"] + case["tokens"] for case in cases]
    passes = score_texts(pair.target, pair.drafter, pair.weights["target"], texts)
    ends = [(len(case["prompt"]["ids"]) - 1, len(text) - 1) for case, text in zip(cases, texts, strict=True)]
    logits = np.concatenate([found.logits[begin:end] for found, (begin, end) in zip(passes, ends, strict=True)])
    return np.asarray(jax.nn.log_softmax(logits))


def test_bfloat16_is_no_worse_than_the_reference(pair, half_pair, cases) -> None:
    limits = json.loads((golden_ref() / "bf16.json").read_text(encoding="utf-8"))
    tokens = np.array([token for case in cases for token in case["tokens"]])
    exact, rounded = (log_probabilities(one, cases) for one in (pair, half_pair))
    assert len(tokens) == limits["positions"]
    assert np.array_equal(exact.argmax(-1), tokens)
    agreement = (rounded.argmax(-1) == tokens).mean()
    at_token = lambda values: np.take_along_axis(values, tokens[:, None], -1)[:, 0]
    difference = np.abs(at_token(exact) - at_token(rounded))
    found = {"mean": difference.mean(), "p99": np.quantile(difference, 0.99), "max": difference.max()}
    assert agreement >= limits["argmax_agreement"]
    for name, limit in limits["abs_logprob_difference"].items():
        assert found[name] <= limit, (name, found)
    margins = np.concatenate([case["margins"] for case in cases])[rounded.argmax(-1) != tokens]
    assert margins.max() <= max(limits["float32_margins_at_disagreements"]) + 1e-3  # the file is rounded


def test_bfloat16_decodes_with_a_tree(half_pair, cases) -> None:
    """The engine as users run it: caches in bfloat16, and tokens that agree with float32 for a good while."""
    engine = half_pair.engine(Capacity(rows=9, candidates=8, context=160, rounds=8, chunk=16))
    assert engine.abstract_state().latents.dtype == ml_dtypes.bfloat16
    case = cases[1]
    (run,) = decode(engine, [Request(case["prompt"]["ids"], max_tokens=24, budget=8)])
    assert run.tokens[:8] == case["tokens"][:8]
    assert max(run.lengths) > 1
