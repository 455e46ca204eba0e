"""Tree attention, every implementation, against a dense float64 oracle."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jddtree.decoding.tree import ancestor_words
from pallas_kernels.tree_attention import KEY_BLOCK, causal_words, tree_attention, visible

LATENT, ROTATED = 16, 8
SCALE = 0.25
IMPLEMENTATIONS = ["xla"]


class Case(NamedTuple):
    """Arguments of `tree_attention`, float32 NumPy."""

    queries: np.ndarray
    cache: np.ndarray
    layer: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    ancestors: np.ndarray


@partial(jax.jit, static_argnames="implementation")
def attend(case: Case, implementation: str) -> jax.Array:
    return tree_attention(*case, latent_size=LATENT, scale=SCALE, implementation=implementation)


def random_case(seed: int, *, count=20, heads=4, context=150, lengths=(0, 1, 77), valid=None, layers=2) -> Case:
    """Random trees over random caches; the rows from `valid[b]` on are padding."""
    random = np.random.default_rng(seed)
    batch, width = len(lengths), LATENT + ROTATED
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    parents = np.array([[-1, *(random.integers(0, row) for row in range(1, count))] for _ in range(batch)], np.int32)
    used = np.arange(count)[None] < np.asarray(valid or [count] * batch)[:, None]
    words = np.asarray(ancestor_words(jnp.asarray(parents), jnp.asarray(used), count))
    return Case(
        normal(batch, count, heads, width), normal(layers, batch, context, width), np.int32(layers - 1),
        np.array(lengths, np.int32), normal(batch, count, width), words,
    )  # fmt: skip


def dense(case: Case) -> np.ndarray:
    """The oracle, float64 [B, C, heads, LATENT]"""
    out = []
    for b, length in enumerate(case.lengths):
        own = reference.unpack_bits(case.ancestors[b], case.rows.shape[1])
        prefix = np.broadcast_to(own.any(1)[:, None], (len(own), length))
        keys = np.concatenate([case.cache[case.layer, b, :length], case.rows[b]])
        out.append(reference.latent_attention(case.queries[b], keys, np.concatenate([prefix, own], 1), LATENT, SCALE))
    return np.stack(out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestTreeAttention:
    """The contract in the module's docstring."""

    def check(self, case: Case, implementation: str) -> np.ndarray:
        found = np.asarray(attend(case, implementation))
        np.testing.assert_allclose(found, dense(case), atol=5e-6)
        return found

    @pytest.mark.parametrize("seed", range(3))
    def test_random_trees(self, implementation: str, seed: int) -> None:
        self.check(random_case(seed), implementation)

    @pytest.mark.parametrize("heads", [1, 4, 8])
    def test_heads(self, implementation: str, heads: int) -> None:
        self.check(random_case(10, heads=heads), implementation)

    def test_lengths_around_the_key_block(self, implementation: str) -> None:
        context = 2 * KEY_BLOCK + 22  # not a multiple, so the last block overlaps the one before it
        for lengths in ((0, 0, 0), (KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1), (2 * KEY_BLOCK, context - 1, context)):
            self.check(random_case(11, lengths=lengths, context=context), implementation)

    def test_context_smaller_than_the_key_block(self, implementation: str) -> None:
        assert KEY_BLOCK > 7
        for lengths in ((0, 1, 6), (7, 7, 3)):
            self.check(random_case(12, lengths=lengths, context=7), implementation)

    @pytest.mark.parametrize("count", [1, 31, 32, 33, 65])
    def test_row_counts_around_the_words(self, implementation: str, count: int) -> None:
        self.check(random_case(13, count=count), implementation)

    def test_padded_rows_give_exactly_zero(self, implementation: str) -> None:
        found = self.check(random_case(14, valid=(20, 7, 0), lengths=(5, 60, 90)), implementation)
        assert not found[1, 7:].any() and not found[2].any()
        assert found[1, :7].any(axis=(1, 2)).all()

    def test_a_causal_chunk_is_causal_attention(self, implementation: str) -> None:
        used = np.arange(20)[None] < np.array([20, 11, 0])[:, None]
        words = np.asarray(causal_words(jnp.asarray(used)))
        for b, count in enumerate((20, 11, 0)):
            wanted = np.tril(np.ones((20, 20), bool)) & used[b][:, None]
            assert np.array_equal(reference.unpack_bits(words[b], 20), wanted), count
        self.check(random_case(15)._replace(ancestors=words), implementation)

    def test_every_layer_is_reached(self, implementation: str) -> None:
        case = random_case(16, layers=3)
        found = [self.check(case._replace(layer=np.int32(layer)), implementation) for layer in range(3)]
        assert np.abs(found[0] - found[1]).max() > 0.01

    def test_nan_in_cache_tails_other_layers_and_unseen_rows(self, implementation: str) -> None:
        case = random_case(17, valid=(20, 7, 0))
        clean = attend(case, implementation)
        cache, rows, queries = case.cache.copy(), case.rows.copy(), case.queries.copy()
        cache[0] = np.nan
        for b, (length, used) in enumerate(zip(case.lengths, (20, 7, 0), strict=True)):
            cache[1, b, length:] = np.nan
            rows[b, used:], queries[b, used:] = np.nan, np.nan
        poisoned = attend(case._replace(cache=cache, rows=rows, queries=queries), implementation)
        assert np.array_equal(clean, poisoned)

    def test_large_scores_do_not_overflow(self, implementation: str) -> None:
        case = random_case(18)
        loud = case._replace(queries=case.queries * np.float32(200))
        np.testing.assert_allclose(attend(loud, implementation), dense(loud), atol=2e-3)

    def test_bfloat16(self, implementation: str) -> None:
        case = random_case(19, lengths=(0, 60, 150))
        half = lambda array: jnp.asarray(array, jnp.bfloat16)
        halved = case._replace(queries=half(case.queries), cache=half(case.cache), rows=half(case.rows))
        found = attend(halved, implementation)
        assert found.dtype == jnp.bfloat16
        exact = Case(*(np.asarray(array).astype(np.float32) if array.dtype == jnp.bfloat16 else np.asarray(array)
                       for array in halved))  # fmt: skip
        np.testing.assert_allclose(np.asarray(found, np.float32), dense(exact), atol=0.03)  # weights have 8 bits


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        attend(random_case(0), "cuda")


def test_visible_unpacks_words() -> None:
    words = np.array([[[5, 0], [0xFFFFFFFF, 1], [1 << 31, 2]]], np.uint32)
    assert np.array_equal(visible(jnp.asarray(words), 35), reference.unpack_bits(words, 35))
