"""Ids that pad the vocabulary, a rank's share or the checkpoint's: never chosen, never drafted, never
counted.
"""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_folders import copy_folder, edit_folder
from conftest import micro_target
from harness import decode
from jax.sharding import PartitionSpec as P

import jddtree
from jddtree.decoding.sampling import Sampling, choose
from jddtree.models.target import Target
from jddtree.parallel.mesh import AXIS, make_mesh
from jddtree.parallel.split_logits import Vocabulary
from jddtree.prompts import prompt_ids

IDS = 11  # over 4 ranks: 3 each, the last has 2 and one of padding
PADDED = 12


def over_ranks(call, logits: np.ndarray, ranks: int = 4):
    """What `call` (of a vocabulary and logits) gives with the last axis of the logits over ranks."""
    function = partial(call, Vocabulary(IDS, AXIS))
    specs = P(*[None] * (logits.ndim - 1), AXIS)
    return jax.jit(
        jax.shard_map(function, mesh=make_mesh(ranks), in_specs=specs, out_specs=P(), check_vma=False)
    )(logits)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """Real logits below 0, as zeros of a padded head would win against them; those of padding are 50. [2, 3,
    12]
    """
    values = -1 - np.random.default_rng(0).random((2, 3, PADDED), np.float32)
    values[..., IDS:] = 50.0
    return values


def test_padding_of_a_rank_is_never_chosen(logits: np.ndarray) -> None:
    """Neither at temperature 0, the first sequence, nor above it."""
    numbers = jnp.arange(2, dtype=jnp.uint32)
    sampling = Sampling(jnp.array([0.0, 1.0]), jnp.ones(2), numbers, numbers)
    positions = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)

    def chosen(vocabulary: Vocabulary, part: jax.Array) -> jax.Array:
        return choose(vocabulary.mask(part), positions, sampling, vocabulary)

    found = over_ranks(chosen, logits)
    assert (found < IDS).all()
    np.testing.assert_array_equal(found[0], logits[0, :, :IDS].argmax(-1))
    np.testing.assert_array_equal(found, choose(jnp.asarray(logits[..., :IDS]), positions, sampling))


def test_padding_of_a_rank_is_never_drafted_and_has_no_probability(logits: np.ndarray) -> None:
    best, ids = over_ranks(lambda vocabulary, part: vocabulary.top_k(vocabulary.mask(part), 5), logits)
    wanted = np.argsort(-logits[..., :IDS], axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(best, np.take_along_axis(logits, wanted, -1))
    total = over_ranks(lambda vocabulary, part: vocabulary.logsumexp(vocabulary.mask(part)), logits)
    np.testing.assert_allclose(total[..., 0], np.log(np.exp(logits[..., :IDS]).sum(-1)), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_only_real_ids_must_be_finite(logits: np.ndarray, value: float) -> None:
    finite = lambda vocabulary, part: vocabulary.finite(part)
    padded, broken = logits.copy(), logits.copy()
    padded[..., IDS:] = value
    assert over_ranks(finite, padded).all()
    broken[1, 2, IDS - 1] = value
    wanted = np.ones((2, 3), bool)
    wanted[1, 2] = False
    np.testing.assert_array_equal(over_ranks(finite, broken), wanted)


EXTRA = 64


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> jddtree.Model:
    """The micro target with 64 ids that its tokenizer does not have; one of them has the largest logit of any
    row.
    """
    folder = copy_folder(micro_target(), tmp_path_factory.mktemp("padded"))

    def add_ids(tensors: dict[str, np.ndarray]) -> None:
        head, embed = (
            tensors["language_model.lm_head.weight"],
            tensors["language_model.model.embed_tokens.weight"],
        )
        loud = (head[: EXTRA // 2].astype(np.float32) * 50).astype(head.dtype)
        tensors["language_model.lm_head.weight"] = np.concatenate([head, loud, -loud])
        tensors["language_model.model.embed_tokens.weight"] = np.concatenate([embed, embed[:EXTRA]])

    edit_folder(folder, add_ids)
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["vocab_size"] = 1280 + EXTRA
    (folder / "config.json").write_text(json.dumps(values))
    return jddtree.load(folder)


def test_ids_without_a_token_have_no_logit(padded: jddtree.Model) -> None:
    assert (padded.target.vocab_size, padded.target.writable_ids) == (1280 + EXTRA, 1280)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(16, 256)), jnp.float32)
    everything = replace(padded.target, writable_ids=None)
    masked, whole = (
        Target(config, padded.weights["target"]).logits(hidden) for config in (padded.target, everything)
    )
    assert (whole.argmax(-1) >= 1280).all()
    np.testing.assert_array_equal(masked[:, :1280], whole[:, :1280])
    assert (masked[:, 1280:] == -jnp.inf).all()


def test_ids_without_a_token_are_never_written(padded: jddtree.Model) -> None:
    shapes = jddtree.Capacity(sequences=2, rows=1, candidates=1, context=64, rounds=16, chunk=32)
    engine = jddtree.compile_engine(padded, shapes)
    prompt = prompt_ids(padded, "def is_empty(self):", thinking=False)
    request = jddtree.Request(prompt=prompt, method="ar", max_tokens=30, stop_ids=padded.stop_ids)
    greedy, sampled = decode(engine, [request, replace(request, temperature=1.0)])
    assert (
        padded.tokenizer.decode(greedy.tokens[:-1]) == "def is_empty(self):\n    return not self.is_empty()"
    )
    assert len(sampled.tokens) > 5 and max(sampled.tokens) < 1280
