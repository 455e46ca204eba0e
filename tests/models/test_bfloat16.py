"""bfloat16 along the reference traces: as far from float32 as rounding takes it, in whatever order sums are
made.

The order of a float32 sum is the machine's. On a CPU with AMX, XLA multiplies bfloat16 by kernels that add 32
terms at a time, even and odd ones apart (TDPBF16PS); elsewhere it adds one term after another. Another order
moves a sum by about 1e-7 of its terms, which turns some roundings to bfloat16 the other way, and a few layers
later every rounding error is another draw. So the errors of one run are a sample. Over 24 shuffled orders
their 99th percentile was 0.085 to 0.126, and 11 to 19 of 1,266 tokens changed; our program with its weights
in 10 other orders gave the same. No number of a single run, ours or the published one, is a limit for another
run.

The rule compares with a sample. `rounded` is a second implementation with the same roundings and with
products in shuffled orders; RUNS of its runs give the mean and the deviation s of each figure. A program that
rounds no more than that gives one more draw, which exceeds the mean by t * s * sqrt(1 + 1 / RUNS) once in
10,000 machines: the prediction interval of a normal sample, t the quantile of Student's distribution. The
published run is one draw as well, so the sample's mean must not exceed it by more than that. Its mean
difference is a limit of its own: it is 8 s away.

The figure with power is `typical`, the mean logarithm of the differences, in which every position weighs the
same. It varies by 0.025 over orders. Sums kept in bfloat16 in the attention's output product, all else right,
raise it by 0.3, and those of the projection to latents by 1.3, of the router by 0.5, of the logits (kept
after 32 terms) by 0.6.
"""

import json

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import golden_ref, micro_drafter, micro_target
from harness import decode, load_pair, score_texts
from rounded import Rounded, in_order, plain_weights

from jddtree.decoding.engine import Request
from jddtree.decoding.state import Capacity
from jddtree.models.kernels import Kernels
from jddtree.models.mla import LatentAttention
from pallas_kernels.common.addends import Addends

RUNS = 12
STUDENT = 5.453  # exceeded once in 10,000 with RUNS - 1 = 11 degrees of freedom
FLOAT32_NOISE = 1e-4  # of a log-probability; smaller differences say nothing


@pytest.fixture(scope="module")
def half_pair():
    """The micro pair in bfloat16."""
    return load_pair(micro_target(), micro_drafter(), ml_dtypes.bfloat16)


def at_traces(cases, passes) -> np.ndarray:
    """Rows of whole texts -> those that choose the traces' tokens, [positions, V]"""
    ends = [(len(case["prompt"]["ids"]) - 1, len(case["tokens"])) for case in cases]
    return np.concatenate(
        [rows[first : first + count] for rows, (first, count) in zip(passes, ends, strict=True)]
    )


def texts_of(cases) -> list[list[int]]:
    return [case["prompt"]["ids"] + case["tokens"] for case in cases]


def log_probabilities(pair, cases) -> np.ndarray:
    """float32 [positions, V]: what the model says at each token of the traces, teacher-forced in one pass per
    text.
    """
    passes = score_texts(pair.target, pair.drafter, pair.weights["target"], texts_of(cases))
    return np.asarray(jax.nn.log_softmax(at_traces(cases, [one.logits for one in passes])))


@pytest.fixture(scope="module")
def exact(pair, cases) -> np.ndarray:
    """The float32 model's `log_probabilities`."""
    return log_probabilities(pair, cases)


@pytest.fixture(scope="module")
def sample(half_pair, exact, cases) -> list[dict[str, float]]:
    """The figures of the second implementation, in RUNS orders of all sums."""
    config = half_pair.target
    weights = plain_weights(half_pair.weights["target"], config)
    runs = (
        Rounded(config, weights, in_order(seed)).log_probabilities(texts_of(cases)) for seed in range(RUNS)
    )
    return [figures(at_traces(cases, run), exact, cases) for run in runs]


def figures(run: np.ndarray, exact: np.ndarray, cases) -> dict[str, float]:
    """How far a run is from float32, larger is further; margins are those of the float32 tokens that it
    changes.
    """
    tokens = np.array([token for case in cases for token in case["tokens"]])
    margins = np.concatenate([case["margins"] for case in cases])
    at_token = lambda values: np.take_along_axis(values, tokens[:, None], -1)[:, 0]
    difference = np.abs(at_token(exact) - at_token(run)).astype(np.float64)
    changed = run.argmax(-1) != tokens
    return {
        "typical": np.log(difference + FLOAT32_NOISE).mean(),
        "mean": difference.mean(),
        "p99": np.quantile(difference, 0.99),
        "max": difference.max(),
        "changed": changed.mean(),
        "margin": margins[changed].max(initial=0.0),
    }


def published() -> dict[str, float]:
    """What is stored of the published implementation's run: its figures, and of how many positions."""
    stored = json.loads((golden_ref() / "bf16.json").read_text(encoding="utf-8"))
    margin = max(stored["float32_margins_at_disagreements"])
    counts = {"positions": stored["positions"], "changed": 1 - stored["argmax_agreement"], "margin": margin}
    return stored["abs_logprob_difference"] | counts


def beyond(found: dict[str, float], sample: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The figures that are larger than another draw of the sample's would be, with their limits."""
    limits = {name: limit([one[name] for one in sample]) for name in sample[0]}
    return {name: (value, limits[name]) for name, value in found.items() if not value <= limits[name]}


def limit(values: list[float]) -> float:
    """What the next draw exceeds once in 10,000."""
    return float(np.mean(values) + STUDENT * np.std(values, ddof=1) * np.sqrt(1 + 1 / len(values)))


def accumulated_in_bfloat16(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, K] times weight [N, K], every sum rounded to bfloat16 after every term."""
    term = lambda total, pair: ((total + pair[0][:, None] * pair[1][None, :]).astype(jnp.bfloat16), None)
    empty = jnp.zeros((x.shape[0], weight.shape[0]), jnp.bfloat16)
    return jax.lax.scan(term, empty, (x.T, weight.T))[0]


class InBfloat16(Kernels):
    """Kernels whose last products have sums in bfloat16."""

    def project_out(self, x, stack, place):
        """As the right one, [T, H]."""
        return Addends((accumulated_in_bfloat16(x, place.of(stack)).astype(jnp.float32)[None],))


def plant(monkeypatch) -> None:
    """bfloat16 sums in one product of whole-text passes, that of the attention's output."""
    right, score = LatentAttention.attend, harness._score.__wrapped__

    def attend(self, *arguments):
        kernels = self.kernels
        vars(self)["kernels"] = InBfloat16(
            kernels.implementation, kernels.axis
        )  # past the module's own check
        try:
            return right(self, *arguments)
        finally:
            vars(self)["kernels"] = kernels

    monkeypatch.setattr(LatentAttention, "attend", attend)
    monkeypatch.setattr(
        harness, "_score", jax.jit(lambda *arguments: score(*arguments), static_argnums=(0, 1))
    )


def test_bfloat16_is_as_far_from_float32_as_rounding_takes_it(half_pair, exact, sample, cases) -> None:
    tokens = np.array([token for case in cases for token in case["tokens"]])
    assert np.array_equal(exact.argmax(-1), tokens)
    found = figures(log_probabilities(half_pair, cases), exact, cases)
    assert not beyond(found, sample)
    assert found["mean"] <= published()["mean"]


def test_rounding_is_no_worse_than_in_the_published_run(exact, sample) -> None:
    stored = published()
    assert len(exact) == stored.pop("positions")
    for name, value in stored.items():
        values = [one[name] for one in sample]
        assert np.mean(values) <= value + limit(values) - np.mean(values), name


def test_bfloat16_sums_in_one_product_are_refused(monkeypatch, half_pair, exact, sample, cases) -> None:
    plant(monkeypatch)
    found = figures(log_probabilities(half_pair, cases), exact, cases)
    assert "typical" in beyond(found, sample), found


def test_bfloat16_decodes_with_a_tree(half_pair, cases) -> None:
    """The engine as users run it: caches in bfloat16, and tokens that agree with float32 for a good while."""
    engine = half_pair.engine(Capacity(rows=9, candidates=8, context=160, rounds=8, chunk=16))
    assert engine.abstract_state().latents.dtype == ml_dtypes.bfloat16
    case = cases[1]
    (run,) = decode(engine, [Request(case["prompt"]["ids"], max_tokens=24, budget=8)])
    assert run.tokens[:8] == case["tokens"][:8]
    assert max(run.lengths) > 1
