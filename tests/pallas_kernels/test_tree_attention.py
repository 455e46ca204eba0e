"""Tree attention, every implementation, against a dense float64 oracle."""

import importlib.util
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import export

from jddtree.decoding.tree import ancestor_words
from pallas_kernels.attention.api import KEY_BLOCK, causal_words, tree_attention, visible
from pallas_kernels.attention.launch import (
    GENERATIONS,
    AttentionLaunch,
    attention_launch,
    splits,
)
from pallas_kernels.attention.triton import tree_attention_triton
from pallas_kernels.common.device import mosaic_supported
from pallas_kernels.common.lowering import (
    MOSAIC_TARGET,
    TRITON_TARGET,
    cuda_target,
    quiet_triton,
)

SCALE = 0.25
SIZES = {"xla": (16, 8), "triton": (32, 16), "mosaic": (512, 64)}  # latent and rotated values
needs_mosaic = pytest.mark.skipif(
    not mosaic_supported() or importlib.util.find_spec("absl") is None,
    reason="jax's Mosaic GPU interpreter is in jax 0.11 and later, and needs absl",
)
IMPLEMENTATIONS = ["xla", "triton", pytest.param("mosaic", marks=needs_mosaic)]


class Case(NamedTuple):
    """Arguments of `tree_attention`, NumPy."""

    queries: np.ndarray
    cache: np.ndarray
    layer: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    ancestors: np.ndarray

    def cast(self, dtype: jnp.dtype) -> "Case":
        cast = lambda array: np.asarray(array, dtype)
        return self._replace(queries=cast(self.queries), cache=cast(self.cache), rows=cast(self.rows))


@partial(jax.jit, static_argnames="implementation")
def attend(case: Case, implementation: str) -> jax.Array:
    latent = SIZES[implementation][0] if implementation in SIZES else 1
    return tree_attention(*case, latent_size=latent, scale=SCALE, implementation=implementation)


def random_case(
    implementation: str,
    seed: int,
    *,
    count=20,
    heads=2,
    context=152,
    lengths=(0, 1, 77),
    valid=None,
    layers=2,
) -> Case:
    """Random trees over random caches in sizes and dtype of an implementation; rows from `valid[b]` on are
    padding.
    """
    random = np.random.default_rng(seed)
    batch, width = len(lengths), sum(SIZES[implementation])
    dtype = jnp.bfloat16 if implementation == "mosaic" else jnp.float32
    normal = lambda *shape: random.standard_normal(shape, np.float32)
    parents = np.array(
        [[-1, *(random.integers(0, row) for row in range(1, count))] for _ in range(batch)], np.int32
    )
    used = np.arange(count)[None] < np.asarray(valid or [count] * batch)[:, None]
    words = np.asarray(ancestor_words(jnp.asarray(parents), jnp.asarray(used), count))
    case = Case(
        normal(batch, count, heads, width),
        normal(layers, batch, context, width),
        np.int32(layers - 1),
        np.array(lengths, np.int32),
        normal(batch, count, width),
        words,
    )
    return case.cast(dtype)


def dense(case: Case) -> np.ndarray:
    """The oracle, float64 [B, C, heads, latent]"""
    out, case = [], case.cast(np.float64)
    latent = {sum(sizes): sizes[0] for sizes in SIZES.values()}[case.rows.shape[2]]
    for b, length in enumerate(case.lengths):
        own = reference.unpack_bits(case.ancestors[b], case.rows.shape[1])
        prefix = np.broadcast_to(own.any(1)[:, None], (len(own), length))
        keys = np.concatenate([case.cache[case.layer, b, :length], case.rows[b]])
        out.append(
            reference.latent_attention(case.queries[b], keys, np.concatenate([prefix, own], 1), latent, SCALE)
        )
    return np.stack(out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestTreeAttention:
    """The contract in the module's docstring."""

    def check(self, case: Case, implementation: str) -> np.ndarray:
        found, wanted = np.asarray(attend(case, implementation)), dense(case)
        assert found.dtype == case.queries.dtype
        if found.dtype == np.float32:
            np.testing.assert_allclose(found, wanted, atol=5e-6)
        else:
            assert np.linalg.norm(found.astype(np.float64) - wanted) < 4e-3 * np.linalg.norm(wanted)
        return found

    @pytest.mark.parametrize("seed", range(2))
    def test_random_trees(self, implementation: str, seed: int) -> None:
        self.check(random_case(implementation, seed), implementation)

    def test_many_heads(self, implementation: str) -> None:
        self.check(random_case(implementation, 10, heads=8, count=9), implementation)

    def test_lengths_around_the_key_block(self, implementation: str) -> None:
        context = 2 * KEY_BLOCK + 24  # not a multiple, so the last block overlaps the one before it
        for lengths in ((0, KEY_BLOCK - 1, KEY_BLOCK), (KEY_BLOCK + 1, 2 * KEY_BLOCK, context)):
            self.check(random_case(implementation, 11, lengths=lengths, context=context), implementation)

    def test_context_smaller_than_the_key_block(self, implementation: str) -> None:
        if implementation == "mosaic":
            with pytest.raises(ValueError, match="64 keys or more, a multiple of 8, got .* 7 keys"):
                attend(random_case(implementation, 12, lengths=(0, 1, 6), context=7), implementation)
            return
        assert KEY_BLOCK > 7
        for lengths in ((0, 1, 6), (7, 7, 3)):
            self.check(random_case(implementation, 12, lengths=lengths, context=7), implementation)

    @pytest.mark.parametrize("count", [1, 32, 33, 65])
    def test_row_counts_around_the_words(self, implementation: str, count: int) -> None:
        self.check(random_case(implementation, 13, count=count, heads=1), implementation)

    def test_padded_rows_give_exactly_zero(self, implementation: str) -> None:
        found = self.check(
            random_case(implementation, 14, valid=(20, 7, 0), lengths=(5, 60, 90)), implementation
        )
        assert not found[1, 7:].any() and not found[2].any()
        assert found[1, :7].any(axis=(1, 2)).all()

    def test_a_causal_chunk_is_causal_attention(self, implementation: str) -> None:
        used = np.arange(20)[None] < np.array([20, 11, 0])[:, None]
        words = np.asarray(causal_words(jnp.asarray(used)))
        for b, count in enumerate((20, 11, 0)):
            wanted = np.tril(np.ones((20, 20), bool)) & used[b][:, None]
            assert np.array_equal(reference.unpack_bits(words[b], 20), wanted), count
        self.check(random_case(implementation, 15)._replace(ancestors=words), implementation)

    def test_every_layer_is_reached(self, implementation: str) -> None:
        case = random_case(implementation, 16)
        found = [self.check(case._replace(layer=np.int32(layer)), implementation) for layer in range(2)]
        assert np.abs(found[0] - found[1]).max() > 0.01

    def test_nan_in_cache_tails_other_layers_and_unseen_rows(self, implementation: str) -> None:
        case = random_case(implementation, 17, valid=(20, 7, 0))
        clean = attend(case, implementation)
        cache, rows, queries = case.cache.copy(), case.rows.copy(), case.queries.copy()
        cache[0] = np.nan
        for b, (length, used) in enumerate(zip(case.lengths, (20, 7, 0), strict=True)):
            cache[1, b, length:] = np.nan
            rows[b, used:], queries[b, used:] = np.nan, np.nan
        poisoned = attend(case._replace(cache=cache, rows=rows, queries=queries), implementation)
        assert np.array_equal(clean, poisoned)

    def test_large_scores_do_not_overflow(self, implementation: str) -> None:
        case = random_case(implementation, 18)
        loud = case._replace(queries=case.queries * case.queries.dtype.type(200))
        # The result itself is rounded to bfloat16.
        tolerance = 2e-3 if case.queries.dtype == np.float32 else 2e-2
        np.testing.assert_allclose(
            np.asarray(attend(loud, implementation), np.float32), dense(loud), atol=tolerance
        )

    def test_bfloat16(self, implementation: str) -> None:
        self.check(random_case(implementation, 19, lengths=(0, 60, 150)).cast(jnp.bfloat16), implementation)


@needs_mosaic
def test_mosaic_has_no_races() -> None:
    """Two sequences over several blocks, with and without masks, so that every ring and barrier is used
    again.
    """
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races

    from pallas_kernels.attention.mosaic import interpreter, tree_attention_mosaic

    case = random_case("mosaic", 20, count=3, heads=8, context=384, lengths=(384, 100))
    options = {"latent_size": SIZES["mosaic"][0], "scale": SCALE, "interpret": interpreter(detect_races=True)}
    launch = replace(attention_launch(48), multiprocessors=2)
    found = jax.jit(partial(tree_attention_mosaic, launch=launch, **options))(*case)
    assert not get_races().races_found
    assert np.linalg.norm(np.asarray(found, np.float64) - dense(case)) < 4e-3 * np.linalg.norm(dense(case))


def abstract_operands(batch: int, count: int, heads: int, context: int) -> Case:
    """Operands of K2.6's sizes."""
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    whole = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    return Case(
        half(batch, count, heads, 576),
        half(61, batch, context, 576),
        whole(jnp.int32),
        whole(jnp.int32, batch),
        half(batch, count, 576),
        whole(jnp.uint32, batch, count, -(-count // 32)),
    )


def lower_for_cuda(operands: Case, implementation: str, launch: AttentionLaunch) -> str:
    """StableHLO of one call on an H200; raises where the GPU could not compile it for its sizes or
    layouts.
    """
    if implementation == "mosaic":
        from pallas_kernels.attention.mosaic import tree_attention_mosaic as kernel
    else:
        kernel = tree_attention_triton
    call = jax.jit(partial(kernel, latent_size=512, scale=SCALE, launch=launch))
    safe = [export.DisabledSafetyCheck.custom_call(name) for name in (TRITON_TARGET, MOSAIC_TARGET)]
    with cuda_target(), quiet_triton():
        return export.export(call, platforms=["cuda"], disabled_checks=safe)(*operands).mlir_module()


ENTRIES = [(name, entry) for name, table in GENERATIONS for entry in table]


@pytest.mark.parametrize("name, entry", ENTRIES, ids=[f"{name}-{entry.rows}" for name, entry in ENTRIES])
def test_every_launch_lowers_to_triton(name: str, entry: AttentionLaunch) -> None:
    operands = abstract_operands(1, min(entry.rows // 8, 512), 8, 4096)
    assert attention_launch(min(entry.rows, 4096), name) == entry
    assert TRITON_TARGET in lower_for_cuda(operands, "triton", entry)


@needs_mosaic
@pytest.mark.parametrize("batch, count, heads", [(1, 1, 8), (2, 9, 4), (1, 33, 8), (1, 33, 64), (1, 512, 8)])
def test_every_hopper_launch_lowers_to_mosaic(batch: int, count: int, heads: int) -> None:
    entry = attention_launch(batch * count * heads, "sm_90")
    assert MOSAIC_TARGET in lower_for_cuda(abstract_operands(batch, count, heads, 131072), "mosaic", entry)


def test_splits_fill_the_card_once() -> None:
    for tiles in range(1, 600):
        count = splits(tiles, 132)
        waves = -(-tiles * count // 132)
        assert count >= 1 and (waves == 1 or tiles > 66)
        assert waves / count <= -(-tiles // 132)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": np.zeros(2, np.int32)}, r"lengths must be int32 \(3,\) .* got int32 \(2,\)"),
        ({"ancestors": np.zeros((3, 20, 2), np.uint32)}, r"ancestors must be uint32 \(3, 20, 1\)"),
        ({"cache": np.zeros((2, 3, 152, 25), np.float32)}, r"cache must be float32 \[layers, 3, S, 24\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(random_case("xla", 0)._replace(**change), "xla")


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        attend(random_case("xla", 0), "cuda")


def test_visible_unpacks_words() -> None:
    words = np.array([[[5, 0], [0xFFFFFFFF, 1], [1 << 31, 2]]], np.uint32)
    assert np.array_equal(visible(jnp.asarray(words), 35), reference.unpack_bits(words, 35))
