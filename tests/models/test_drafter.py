"""The drafter against third-party results over three rounds, and its windows and masks against a dense
oracle.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import golden_ref
from harness import close, load_arrays, score_texts

from converters.dflash import drafter_parameters
from jddtree.config import DFlashConfig, Rope
from jddtree.models.cache import append_rows
from jddtree.models.drafters.dflash_network import DFlashModel
from jddtree.models.parameters import nest
from jddtree.models.rope import inverse_frequencies
from jddtree.models.target import Target
from pallas_kernels.attention.draft import KEY_BLOCK

STORED = sorted(golden_ref().glob("drafter_*.safetensors"))  # three prompts, two of them bundled
ROUNDS, CONTEXT, NEW = 3, 256, 212  # the longest reference prompt has 212 tokens


@partial(jax.jit, static_argnums=0)
def _round(configs, weights, features, count, start, keys, values, block_ids):
    """One drafter pass with the layers driven one by one; also the pass of the whole drafter."""
    target_config, config = configs
    drafter, target = DFlashModel(config, weights["drafter"]), Target(target_config, weights["target"])
    positions = start[:, None] + jnp.arange(NEW, dtype=jnp.int32)[None]
    new_keys, new_values = drafter.context(features[None], positions)
    keys, values = append_rows(keys, new_keys, start, count), append_rows(values, new_values, start, count)
    length = start + count
    embedded = target.embed(block_ids[None])
    found = {"context_projected": drafter.project(features[None])[0]}
    stream, context = drafter.start(embedded, length, keys, values)
    for index in range(config.num_hidden_layers):
        stream = drafter.layer(jnp.int32(index), stream, context)
        found[f"layer.{index}"] = stream.x
    found["hidden"] = stream.normed
    found["whole"] = drafter(embedded, length, keys, values)[0]
    found["logits"] = target.head(found["whole"])
    return found, keys, values


@pytest.fixture(scope="module", params=STORED, ids=lambda path: path.stem)
def prompt_rounds(request, pair):
    """(reference arrays, what our drafter gave in each of three rounds, its caches after each)"""
    arrays = load_arrays(request.param)
    config = pair.drafter
    keys = values = jnp.full(
        (config.num_hidden_layers, 1, CONTEXT, config.num_key_value_heads, config.head_dim), jnp.nan
    )
    found = []
    for index in range(ROUNDS):
        features = arrays[f"round{index}.context_features"]
        padded = np.full((NEW, features.shape[1]), np.nan, np.float32)
        padded[: len(features)] = features
        count, start = np.array([len(features)], np.int32), arrays[f"round{index}.cached_before"].reshape(1)
        configs = (pair.target, config)
        ids = arrays[f"round{index}.block_ids"]
        result, keys, values = _round(configs, pair.weights, padded, count, start, keys, values, ids)
        found.append((jax.tree.map(np.asarray, result), np.asarray(keys), np.asarray(values)))
    return arrays, found


@pytest.mark.parametrize("index", range(ROUNDS))
def test_rounds_are_the_reference(prompt_rounds, index: int) -> None:
    arrays, found = prompt_rounds
    result, _, _ = found[index]
    compared = [name for name in result if name != "whole"]
    assert {"context_projected", "layer.0", "layer.2", "hidden", "logits"} <= set(compared)
    for name in compared:
        wanted = arrays[f"round{index}.{name}"]
        close(result[name][: len(wanted)], wanted, name)
    close(result["whole"], arrays[f"round{index}.hidden"][1:], "the whole drafter")
    assert result["logits"].argmax(-1).tolist() == arrays[f"round{index}.draft_ids"].tolist()


def test_the_cache_is_the_reference(prompt_rounds) -> None:
    """After round 1, for the two prompts whose cache the reference stores; nothing is written past the
    context.
    """
    arrays, found = prompt_rounds
    _, keys, values = found[1]
    length = int(arrays["round1.cached_before"]) + len(arrays["round1.context_features"])
    for layer in range(len(keys)):
        for name, cache in (("k", keys), ("v", values)):
            wanted = arrays.get(f"round1.cache.{layer}.{name}")
            if wanted is not None:
                close(cache[layer, 0, :length].swapaxes(0, 1), wanted, f"{name} of layer {layer}")
            assert np.isnan(cache[layer, 0, length:]).all()


def test_positions_and_masks_are_the_reference(prompt_rounds, pair) -> None:
    arrays, _ = prompt_rounds
    config = pair.drafter
    for index in range(ROUNDS):
        start = int(arrays[f"round{index}.cached_before"]) + len(arrays[f"round{index}.context_features"])
        ids, positions = arrays[f"round{index}.block_ids"], arrays[f"round{index}.position_ids"]
        assert ids[1:].tolist() == [config.mask_token_id] * (config.block_size - 1)
        assert positions[-config.block_size :].tolist() == list(range(start, start + config.block_size))


def test_the_targets_taps_are_the_references_features(pair) -> None:
    assert len(STORED) >= 2
    stored = [load_arrays(path) for path in STORED]
    passes = score_texts(
        pair.target, pair.drafter, pair.weights["target"], [arrays["prompt_ids"] for arrays in stored]
    )
    for found, arrays in zip(passes, stored, strict=True):
        close(found.taps, arrays["round0.context_features"], "taps")


SLIDING = DFlashConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    block_size=8,
    mask_token_id=1,
    target_layer_ids=(0, 1),
    num_target_layers=4,
    windows=(None, 5, 140),
    causal=(False, True, False),
    rope=Rope(16, 50000.0, 64.0, 128),
)
SLIDING_CONTEXT = KEY_BLOCK + 40  # more than one block of keys, and not a multiple


@pytest.fixture(scope="module")
def sliding():
    """(random) weights of the small drafter as float64, its context rows and its block rows"""
    random = np.random.default_rng(3)
    weights = {
        path: random.uniform(0.5, 1.5, table.shape)
        if "norm" in path
        else random.standard_normal(table.shape) * 0.3
        for path, table in drafter_parameters(SLIDING).items()
    }
    taps = random.standard_normal((1, SLIDING_CONTEXT, 2 * SLIDING.hidden_size))
    return weights, taps, random.standard_normal((1, SLIDING.block_size, SLIDING.hidden_size))


@partial(jax.jit, static_argnums=0)
def _context(config, arrays, taps):
    positions = jnp.arange(taps.shape[1], dtype=jnp.int32)[None]
    return DFlashModel(config, arrays).context(taps, positions)


@partial(jax.jit, static_argnums=0)
def _drafted(config, arrays, x, length, keys, values):
    return DFlashModel(config, arrays)(x, length, keys, values)


def oracle(config: DFlashConfig, weights, taps, x, length: int) -> np.ndarray:
    """The whole drafter in float64; normed rows of slots 1 and on."""
    projected = reference.rms_norm(
        taps[:length] @ weights["fc"].T, weights["hidden_norm"], config.rms_norm_eps
    )
    for index in range(config.num_hidden_layers):
        layer = {
            path.removeprefix("layers."): array[index] for path, array in weights.items() if "layers." in path
        }
        x = reference.drafter_layer(
            x,
            projected,
            layer,
            length,
            inverse_frequencies(config.rope),
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            eps=config.rms_norm_eps,
            window=config.windows[index],
            causal=config.causal[index],
        )
    return reference.rms_norm(x[1:], weights["norm"], config.rms_norm_eps)


@pytest.mark.parametrize(
    ("windows", "causal"),
    [
        ((None, None, None), (False, False, False)),
        ((None, None, None), (True, True, True)),
        ((5, 140, None), (True, True, False)),
        ((5, 140, None), (False, False, False)),
    ],
)
def test_windows_and_causal_switch_against_a_dense_oracle(sliding, windows, causal) -> None:
    """Windows smaller than the block, than the context, and none; contexts empty, short, of a key block,
    more, full.
    """
    weights, taps, x = sliding
    config = replace(SLIDING, windows=windows, causal=causal)
    arrays = nest({path: jnp.asarray(array, jnp.float32) for path, array in weights.items()})
    keys, values = _context(SLIDING, arrays, jnp.asarray(taps, jnp.float32))
    for length in (0, 3, KEY_BLOCK, KEY_BLOCK + 1, SLIDING_CONTEXT):
        unknown = (jnp.arange(SLIDING_CONTEXT) >= length)[None, None, :, None, None]
        poisoned = [jnp.where(unknown, jnp.nan, cache) for cache in (keys, values)]
        found = _drafted(
            config, arrays, jnp.asarray(x, jnp.float32), jnp.array([length], jnp.int32), *poisoned
        )
        wanted = oracle(config, weights, taps[0], x[0], length)
        np.testing.assert_allclose(found[0], wanted, atol=5e-5, err_msg=f"context {length}")


def test_the_switches_matter(sliding) -> None:
    """The oracle's results differ by far more than the tolerance above when a window or a mask changes."""
    weights, taps, x = sliding
    results = [
        oracle(replace(SLIDING, windows=windows, causal=causal), weights, taps[0], x[0], SLIDING_CONTEXT)
        for windows in ((5, 5, 5), (6, 5, 5), (None, 5, 5))
        for causal in ((True, True, True), (False, True, True))
    ]
    for index, one in enumerate(results):
        for other in results[:index]:
            assert np.abs(one - other).max() > 1e-3
