"""Teacher-forced scores, perplexity and golden files, against a whole pass over the text and made-up
recordings.
"""

import json
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eval_harness import CONTEXT, engine, micro, scorer
from harness import compilations, empty_cache

from jddtree.decoding.engine import Request
from jddtree.errors import UserError
from jddtree.evaluation.golden import check_golden, read_golden
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.perplexity import perplexity, windows
from jddtree.models.target import Rows, Target
from jddtree.serving.generation import generate_batch
from pallas_kernels.attention.api import causal_words

TEXT = '    def size(self):\n        """Return the size of the file."""\n        return self._size\n\n' * 8
WIDTH = 96


@pytest.fixture(name="scorer", scope="module")
def shared_scorer():
    """The scorer that all tests share."""
    return scorer()


@pytest.fixture(scope="module")
def recorded():
    """Three greedy answers of the micro model, as the engine wrote them."""
    prompts = [
        [*micro().defaults.raw_prefix, *micro().tokenizer.encode(text)]
        for text in ("def main(", "class A", "if x")
    ]
    return generate_batch(micro(), engine(), [Request(prompt, 20, "ar") for prompt in prompts])


@cache
def whole_pass():
    """A function from tokens int32 [1, WIDTH] to log-probabilities [WIDTH, V], without chunks and cache."""

    def whole(weights, tokens):
        target = Target(micro().target, weights)
        valid = jnp.ones(tokens.shape, bool)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        rows = Rows(positions, valid, causal_words(valid), jnp.zeros(1, jnp.int32))
        scored = target(tokens, rows, empty_cache(micro().target, 1, micro().dtype))
        return jax.nn.log_softmax(target.logits(scored.hidden))[0]

    return jax.jit(whole)


def log_softmax(ids):
    """Log-probabilities float32 [len(ids), V] after each token."""
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(whole_pass()(micro().weights["target"], tokens))[: len(ids)]


def test_scores_equal_a_whole_pass(scorer):
    """Chunks with a cache give what one pass over the text gives."""
    ids = micro().tokenizer.encode(TEXT)[:90]
    wanted, found = log_softmax(ids), scorer.score(ids)
    np.testing.assert_allclose(found.log_probs, wanted[np.arange(89), ids[1:]], atol=2e-4)
    np.testing.assert_array_equal(found.best, wanted[:-1].argmax(-1))
    top = np.sort(wanted[:-1], axis=-1)
    np.testing.assert_allclose(found.best_log_probs, top[:, -1], atol=2e-4)
    np.testing.assert_allclose(found.margins, top[:, -1] - top[:, -2], atol=2e-4)


def test_nothing_compiles_again_and_nothing_stays_from_the_last_text(scorer):
    ids = micro().tokenizer.encode(TEXT)
    first = scorer.score(ids[:50])
    with compilations() as events:
        scorer.score(ids[50:200])
        again = scorer.score(ids[:50])
    assert not events
    np.testing.assert_array_equal(first.log_probs, again.log_probs)


def test_greedy_text_is_the_most_probable(scorer, recorded):
    """The scorer and the engine agree on every token."""
    for result in recorded:
        scores = scorer.score([*result.prompt_ids, *result.token_ids])
        assert scores.best[len(result.prompt_ids) - 1 :].tolist() == result.token_ids


def test_texts_that_cannot_be_scored(scorer):
    for ids in ([5], [5] * (CONTEXT + 1)):
        with pytest.raises(UserError, match="2 to 256 fit"):
            scorer.score(ids)
    with pytest.raises(UserError, match="token id 163586, but this target's are 0 to 1279"):
        scorer.score([5, 163586])
    with pytest.raises(UserError, match="this target takes 2 to 8192"):
        Scorer(micro(), 10**6)


@pytest.mark.parametrize(("count", "context"), [(2, 8), (8, 8), (9, 8), (40, 8), (41, 7), (5, 2)])
def test_windows_score_every_token_once_with_half_a_context(count, context):
    found = list(windows(count, context))
    assert [place for w in found for place in range(w.scored, w.end)] == list(range(1, count))
    assert all(w.end - w.begin <= context for w in found)
    assert all(w.scored - w.begin >= context // 2 for w in found[1:])


def test_perplexity_of_a_text(scorer):
    """The measures follow from the log-likelihood; a text longer than the context is read in windows."""
    ids, prefix = micro().tokenizer.encode(TEXT), micro().defaults.raw_prefix
    seen = []
    found = perplexity(scorer, TEXT, ids[:100], prefix, lambda *done: seen.append(done))
    total = float(scorer.score([*prefix, *ids[:100]]).log_probs.sum(dtype=float))
    assert found["log_likelihood"] == pytest.approx(total) and found["tokens"] == 100 and seen == [(101, 101)]
    assert found["token_perplexity"] == pytest.approx(math.exp(-total / 100))
    assert found["bits_per_byte"] == pytest.approx(-total / len(TEXT) / math.log(2))
    long = perplexity(scorer, TEXT * 4, micro().tokenizer.encode(TEXT * 4), prefix)
    assert long["token_perplexity"] < found["token_perplexity"] and long["tokens"] > CONTEXT
    with pytest.raises(UserError, match="0 tokens"):
        perplexity(scorer, "", [])


@pytest.fixture
def golden_file(tmp_path, scorer, recorded):
    """A function that writes a golden file of the micro model, with each text changed first."""

    def write(change=lambda row: None):
        rows = []
        for number, result in enumerate(recorded):
            table = log_softmax([*result.prompt_ids, *result.token_ids])[len(result.prompt_ids) - 1 : -1]
            ids = np.argsort(-table, axis=-1)[:, :8]
            best = np.take_along_axis(table, ids, axis=-1).tolist()
            row = {
                "name": f"text{number}",
                "prompt_ids": result.prompt_ids,
                "prompt": "",
                "tail": list(result.token_ids),
            }
            row |= {"top1_lp": [place[0] for place in best], "top8_ids": ids.tolist(), "top8_lp": best}
            change(row)
            rows.append(row)
        path = tmp_path / "golden.json"
        path.write_text(json.dumps({"meta": {}, "seqs": rows}))
        return read_golden(path)

    return write


def test_golden_of_the_model_itself_passes(scorer, golden_file):
    report = check_golden(scorer, golden_file())
    assert report["passed"] and report["agreement"] == 1.0 and report["disagreements"] == []
    assert report["places"] == 60 and report["p99_delta"] < 1e-3 and report["per_text"]["text2"] == 1.0


def test_golden_with_shifted_log_probabilities_fails(scorer, golden_file):
    """By less than the limits it passes."""

    def shifted(by):
        def change(row):
            row["top1_lp"] = [value - by for value in row["top1_lp"]]

        return check_golden(scorer, golden_file(change))

    assert shifted(0.04)["passed"]
    report = shifted(0.06)
    assert (
        not report["passed"]
        and report["agreement"] == 1.0
        and report["mean_delta"] == pytest.approx(0.06, abs=1e-3)
    )


def test_golden_judges_disagreements_by_regret(scorer, golden_file):
    """Two recorded tokens that swapped places: fine when nearly as good, not when clearly worse or
    unknown.
    """

    def swapped(regret, known=True):
        def change(row):
            if row["name"] == "text0":
                ours, other = row["top8_ids"][-1][:2]
                row["tail"][-1], row["top8_ids"][-1] = (
                    other,
                    [other, ours if known else 0, *row["top8_ids"][-1][2:]],
                )
                row["top1_lp"][-1], row["top8_lp"][-1][:2] = -1.0, [-1.0, -1.0 - regret]

        return check_golden(scorer, golden_file(change))

    assert swapped(0.6)["passed"]  # 0.30 + 0.35 * 1 are allowed
    report = swapped(0.7)
    assert not report["passed"] and report["agreement"] == pytest.approx(59 / 60)
    (row,) = report["disagreements"]
    assert (
        row["regret"] == pytest.approx(0.7) and row["allowed"] == pytest.approx(0.65) and row["place"] == 19
    )
    assert not swapped(0.1, known=False)["passed"]


def test_corrupted_golden_fails(scorer, golden_file):
    """Tokens of another text."""

    def change(row):
        row["tail"] = row["tail"][::-1]

    report = check_golden(scorer, golden_file(change))
    assert not report["passed"] and report["agreement"] < 0.95


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "has not the form"),
        ('{"seqs": []}', "seqs must hold texts"),
        ('{"seqs": [{"name": "x"}]}', "KeyError"),
        (
            '{"seqs": [{"name": "x", "prompt_ids": [1], "tail": [2], "top1_lp": [], '
            '"top8_ids": [], "top8_lp": []}]}',
            "lists of one length",
        ),
    ],
)
def test_malformed_golden_files(tmp_path, text, wanted):
    path = tmp_path / "golden.json"
    path.write_text(text)
    with pytest.raises(UserError, match=wanted):
        read_golden(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_golden(tmp_path / "none.json")
