"""The target against third-party results in float32: layer by layer, as a whole, with a cache, and over a
tree.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import (
    REFERENCE_EPS,
    TEXT_WIDTH,
    close,
    draft_of,
    empty_cache,
    load_arrays,
    padded,
    rows_of,
    score_texts,
)

from jddtree.config import Rope, target_config
from jddtree.decoding import rounds
from jddtree.decoding.requests import controls_of
from jddtree.decoding.sampling import Sampling, choose
from jddtree.decoding.stages import Models, Verified, commit, follow
from jddtree.decoding.state import RUNNING, Chunk, initial_state
from jddtree.decoding.tree import Shape, build
from jddtree.models.kernels import Kernels
from jddtree.models.layers import rms_norm
from jddtree.models.mla import LatentAttention, view_of
from jddtree.models.observer import Observer
from jddtree.models.rope import inverse_frequencies
from jddtree.models.target import MoELayers, Rows, Target
from pallas_kernels.attention.api import causal_words
from pallas_kernels.common import wide
from pallas_kernels.common.stack import Place
from pallas_kernels.layer.expert_choice import Router, expert_choice
from pallas_kernels.layer.stack_matmul import stack_matmul

TEXTS = (0, 1, 2)


class Routing(NamedTuple):
    """What the router of one layer did: logits [T, experts], ids and weights [T, k]."""

    logits: jax.Array
    ids: jax.Array
    weights: jax.Array


@pytest.fixture(scope="module")
def texts(golden):
    """The reference arrays of the three texts."""
    return [load_arrays(golden / f"target_{text}.safetensors") for text in TEXTS]


@pytest.fixture(scope="module")
def layered(pair, texts):
    """Everything the reference arrays hold, from the layer modules driven one by one; per text, without
    padding.
    """
    config, routings = pair.target, []

    class RecordingLayers(MoELayers):
        def choose(self, parts, place, dtype):
            ids, weights, inner = super().choose(parts, place, dtype)
            routings.append(
                Routing(wide.added(parts, jnp.dtype(jnp.float32))[:, : config.n_routed_experts], ids, weights)
            )
            return ids, weights, inner

    def block(layers, x, view, cache, place):
        """Residual stream [T, H] after a layer, and the layer's cache rows"""
        normed = rms_norm(x, place.of(layers.input_norm[...]), config.rms_norm_eps)
        own = jnp.zeros((cache.shape[0], *view.rows.positions.shape, cache.shape[3]))
        attended, latents = layers.attend(normed, view, own, cache, place)
        x = x + attended.total(x.dtype)
        normed = rms_norm(x, place.of(layers.post_norm[...]), config.rms_norm_eps)
        block = layers.feed_forward(normed, view.valid, place)
        return x + block.addends.total(x.dtype), latents[place.layer]

    @jax.jit
    def embed(weights, tokens, counts):
        return jnp.where(
            rows_of(counts, tokens.shape[1]).valid[..., None], Target(config, weights).embed(tokens), 0
        )

    @partial(jax.jit, static_argnums=0)
    def layer(kind, weights, x, counts, index):
        """Residual stream [B, T, H] after a layer of a kind, the layer's cache rows, and what its "
        "router chose"""
        target, rows = Target(config, weights), rows_of(counts, x.shape[1])
        view = view_of(rows, config, config.num_attention_heads)
        cache = empty_cache(config, x.shape[0], jnp.float32)
        moe = RecordingLayers(config, weights["moe"], target.kernels, target.moe.experts)
        layers, first = {"dense": (target.dense, 0), "moe": (moe, config.first_k_dense_replace)}[kind]
        flat, latents = block(layers, x.reshape(-1, config.hidden_size), view, cache, Place(index, first))
        by_text = [jax.tree.map(lambda array: array.reshape(*x.shape[:2], -1), one) for one in routings]
        routings.clear()
        return flat.reshape(x.shape), latents, by_text

    @jax.jit
    def head(weights, x):
        target = Target(config, weights)
        normed = rms_norm(x, target.ends.norm, config.rms_norm_eps)
        return {"final_norm": normed, "logits": target.head(normed)}

    weights = pair.weights["target"]
    tokens, counts = padded([text["input_ids"] for text in texts])
    x = embed(weights, tokens, counts)
    found = {"embed": x}
    for index in range(config.num_hidden_layers):
        kind = "dense" if index < config.first_k_dense_replace else "moe"
        x, latents, routing = layer(kind, weights, x, counts, jnp.int32(index))
        latent, key = jnp.split(latents, [config.kv_lora_rank], axis=-1)
        found |= {f"layer.{index}": x, f"cache.{index}.latent": latent, f"cache.{index}.k_rope": key}
        for one in routing:
            found |= {f"router.{index}.{name}": array for name, array in one._asdict().items()}
    found |= head(weights, x)
    return [{name: np.asarray(array)[b, : counts[b]] for name, array in found.items()} for b in TEXTS]


def names(texts, *prefixes: str) -> list[str]:
    return [name for name in texts[0] if name.startswith(prefixes)]


@pytest.mark.parametrize("text", TEXTS)
def test_hidden_states_and_logits_are_the_reference(layered, texts, text: int) -> None:
    compared = [
        name for name in ("embed", "final_norm", "logits", *names(texts, "layer.")) if name in texts[text]
    ]
    assert {"logits", "layer.5"} <= set(compared)
    for name in compared:
        wanted = texts[text][name]
        # The bundled copy of the longest text has its end only.
        close(layered[text][name][-len(wanted) :], wanted, name)


@pytest.mark.parametrize("text", TEXTS)
def test_cache_rows_are_the_reference(layered, texts, text: int) -> None:
    for name in names(texts, "cache."):
        if name in texts[text]:
            close(layered[text][name], texts[text][name], name)


@pytest.mark.parametrize("text", TEXTS)
def test_router_logits_choices_and_weights_are_the_reference(layered, texts, text: int) -> None:
    """The reference stores the chosen experts in no order, so both sides are sorted by id."""
    compared = [index for index in range(1, 6) if f"router.{index}.ids" in texts[text]]
    for index in compared:
        ours, wanted = (
            {kind: arrays[f"router.{index}.{kind}"] for kind in ("logits", "ids", "weights")}
            for arrays in (layered[text], texts[text])
        )
        close(ours["logits"], wanted["logits"], f"router.{index}.logits")
        order, wanted_order = (np.argsort(side["ids"], axis=-1) for side in (ours, wanted))
        sort = np.take_along_axis
        assert np.array_equal(sort(ours["ids"], order, -1), sort(wanted["ids"], wanted_order, -1))
        close(
            sort(ours["weights"], order, -1),
            sort(wanted["weights"], wanted_order, -1),
            f"router.{index}.weights",
        )


def test_router_arrays_are_compared(texts) -> None:
    assert sum(f"router.{index}.ids" in text for index in range(1, 6) for text in texts) >= 10


def test_the_scanned_model_is_its_layers(pair, layered, texts) -> None:
    passes = score_texts(
        pair.target, pair.drafter, pair.weights["target"], [text["input_ids"] for text in texts]
    )
    for found, wanted in zip(passes, layered, strict=True):
        close(found.logits, wanted["logits"], "logits")
        taps = np.concatenate([wanted[f"layer.{tap}"] for tap in pair.drafter.target_layer_ids], axis=-1)
        close(found.taps, taps, "taps")
        for index, latents in enumerate(found.latents):
            both = np.concatenate([wanted[f"cache.{index}.latent"], wanted[f"cache.{index}.k_rope"]], axis=-1)
            close(latents, both, f"latents of layer {index}")


def test_a_tap_of_another_layer_would_be_noticed(layered) -> None:
    for tap in (1, 2, 3):
        assert np.abs(layered[0][f"layer.{tap}"] - layered[0][f"layer.{tap + 1}"]).max() > 0.1


def test_production_eps_is_the_reference_variant(pair, texts, micro_target_dir) -> None:
    """The default eps of the latent norms, 1e-5, moves logits by less than 1e-4, so the nearer of two is
    asked for.
    """
    config = target_config(micro_target_dir)
    assert config.latent_norm_eps == 1e-5 != REFERENCE_EPS
    passes = score_texts(config, pair.drafter, pair.weights["target"], [text["input_ids"] for text in texts])
    for found, arrays in zip(passes, texts, strict=True):
        wanted, other = arrays["variant.lora_norm_eps_1e-5.logits_last8"], arrays["logits"][-8:]
        close(found.logits[-8:], wanted, "logits")
        assert np.abs(found.logits[-8:] - wanted).mean() < np.abs(found.logits[-8:] - other).mean()


def test_int4_weights_are_rounded_to_bfloat16(layered, texts) -> None:
    """Unrounded q * scale gives other logits; the tolerance tells them apart."""
    for found, arrays in zip(layered, texts, strict=True):
        assert np.abs(found["logits"][-8:] - arrays["variant.exact_dequant.logits_last8"]).max() > 2e-3


@pytest.mark.parametrize("text", (0, 1))
def test_a_tree_verification_pass_is_the_reference(pair, golden, text: int) -> None:
    """From the drafter's logits to the committed cache: draft, build, verify, walk and commit are the real
    code.
    """
    arrays = load_arrays(golden / f"tree_verify_{text}.safetensors")
    found = verify(pair, arrays)
    count = len(arrays["verify_ids"])
    assert found["tokens"][:count].tolist() == arrays["verify_ids"].tolist()
    assert found["parents"][:count].tolist() == arrays["parents"].tolist()
    assert found["positions"][:count].tolist() == arrays["verify_positions"].tolist()
    sees = reference.unpack_bits(found["ancestors"], len(found["tokens"]))
    assert np.array_equal(sees[:count, :count], arrays["visibility"].astype(bool))
    assert not sees[count:].any() and not sees[:, count:].any()
    close(found["logits"][:count], arrays["verify_logits"], "logits")
    close(found["taps"][:count], arrays["verify_features"], "taps")
    accepted = arrays["accepted_nodes"].tolist()
    assert found["path"][: found["length"]].tolist() == accepted
    assert found["newest"] == arrays["next_token"]
    begin = len(arrays["prompt_ids"])
    for layer in range(pair.target.num_hidden_layers):
        cached = found["cache"][layer, 0, begin : begin + len(accepted)]
        latent, key = np.split(cached, [pair.target.kv_lora_rank], axis=-1)
        close(latent, arrays[f"committed_cache.{layer}.latent"], f"latent {layer}")
        close(key, arrays[f"committed_cache.{layer}.k_rope"], f"key {layer}")
        assert not found["cache"][layer, 0, begin + len(accepted) :].any()


class FirstExpertOnly(Observer):
    """Sends every row to expert 0, k times over."""

    def route(self, ids, arrays, place):
        return jnp.zeros_like(ids)


def test_an_observer_sees_and_changes_the_choice_of_experts(pair) -> None:
    """Without one the pass keeps none of it."""
    config, tokens = pair.target, jnp.array([[5, 6, 7]])

    @partial(jax.jit, static_argnums=0)
    def scored(observer):
        model = Target(config, pair.weights["target"], observer=observer)
        return model(tokens, rows_of(jnp.array([3]), 3), empty_cache(config, 1, jnp.float32))

    plain, seen, moved = (scored(observer) for observer in (None, Observer(), FirstExpertOnly()))
    shape = (config.num_moe_layers, 1, 3, config.num_experts_per_tok)
    assert plain.experts is None and seen.experts.shape == moved.experts.shape == shape
    assert np.array_equal(plain.hidden, seen.hidden) and not np.array_equal(seen.hidden, moved.hidden)
    assert (np.diff(np.sort(seen.experts, axis=-1)) > 0).all() and not np.asarray(moved.experts).any()


VERIFY_SHAPES = {"sequences": 1, "rows": 65, "candidates": 64, "context": 112, "chunk": 96}


def verify(pair, arrays) -> dict[str, np.ndarray]:
    """Run one round by hand on a reference pass."""
    program, prompt = pair.program(**VERIFY_SHAPES), arrays["prompt_ids"]
    tokens = np.zeros((1, VERIFY_SHAPES["chunk"]), np.int32)
    tokens[0, : len(prompt)] = prompt
    counts, budget = np.array([len(prompt)], np.int32), np.array([len(arrays["verify_ids"]) - 1], np.int32)
    return jax.tree.map(
        np.asarray,
        _verify(
            program, pair.weights, tokens, counts, arrays["verify_ids"][:1], budget, arrays["draft_logits"]
        ),
    )


def _verify_once(program, weights, tokens, counts, root, budget, draft_logits):
    models = Models(program, weights)
    state = initial_state(program.target, program.drafter, program.capacity, jnp.float32)
    ones, most = jnp.ones(1, jnp.int32), jnp.full(1, 1000, jnp.int32)
    sampling = Sampling(jnp.zeros(1), jnp.ones(1), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.uint32))
    controls = controls_of(program, [None])._replace(
        trees=Shape(budget, most, jnp.zeros(1, bool)), max_tokens=most
    )
    state, _ = rounds.prefill(program, weights, state, controls, Chunk(tokens, counts, ones == 0))
    state = state._replace(root=root, finish=ones * RUNNING)
    log_probs, ids = draft_of(draft_logits[None], program.capacity.candidates)
    tree = build(root, log_probs, ids, controls.trees, models.lattice, program.capacity.rows)
    rows = Rows(state.length[:, None] + tree.depths, tree.valid, tree.ancestors, state.length)
    scored = models.target(tree.tokens, rows, state.latents)
    logits = models.target.logits(scored.hidden)
    choices = choose(logits, rows.positions + 1, sampling)
    path, length, emitted = walked = follow(program, tree, choices)
    state, _ = commit(models, state, controls, Verified(scored, choices, ones == 1), walked)
    first = {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "positions": rows.positions,
        "ancestors": tree.ancestors,
    }
    first |= {"logits": logits, "taps": scored.taps, "path": path, "length": length, "newest": state.root}
    return {name: array[0] for name, array in first.items()} | {"cache": state.latents}


_verify = jax.jit(_verify_once, static_argnums=0)


def small_attention(random):
    """A small configuration, weights in the checkpoint's layout, and the module with the same weights in
    ours.
    """
    heads, nope, rope, value, latent, low, hidden = 3, 8, 12, 10, 16, 14, 24
    config = SimpleNamespace(
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        latent_norm_eps=1e-5,
        softmax_scale=(nope + rope) ** -0.5 * 2.0,
        rope=Rope(rope, 50000.0, 64.0, 128),
    )
    normal = lambda *shape: random.standard_normal(shape) * shape[-1] ** -0.5
    weights = {
        "q_a": normal(low, hidden),
        "q_a_norm": random.uniform(0.5, 1.5, low),
        "q_b": normal(heads * (nope + rope), low),
        "kv_a": normal(latent + rope, hidden),
        "kv_a_norm": random.uniform(0.5, 1.5, latent),
        "kv_b": normal(heads * (nope + value), latent),
        "o": normal(hidden, heads * value),
    }
    halves = np.r_[0:rope:2, 1:rope:2]
    q_b = weights["q_b"].reshape(heads, nope + rope, low)
    kv_b = weights["kv_b"].reshape(heads, nope + value, latent)
    ours = {
        **{name: weights[name] for name in ("q_a", "q_a_norm", "kv_a_norm", "o")},
        "q_b": np.concatenate([q_b[:, :nope], q_b[:, nope + halves]], axis=1).reshape(-1, low),
        "kv_a": np.concatenate([weights["kv_a"][:latent], weights["kv_a"][latent + halves]]),
        "k_up": kv_b[:, :nope],
        "v_up": kv_b[:, nope:],
    }
    module = LatentAttention(
        config, {name: jnp.asarray(array, jnp.float32)[None] for name, array in ours.items()}, Kernels()
    )
    sizes = {
        "heads": heads,
        "nope": nope,
        "value": value,
        "eps": config.latent_norm_eps,
        "scale": config.softmax_scale,
    }
    return config, weights, module, sizes


def test_absorbed_attention_is_plain_attention() -> None:
    """Queries in the latent space over a cache of latents give what keys and values of every head give."""
    random = np.random.default_rng(0)
    config, weights, module, sizes = small_attention(random)
    count = 12
    x, positions = random.standard_normal((count, 24)), np.arange(count)
    frequencies = inverse_frequencies(config.rope)
    wanted = reference.plain_mla(
        x, weights, positions, frequencies, np.tril(np.ones((count, count), bool)), **sizes
    )

    @jax.jit
    def attend(cache, length):
        """The rows from `length` on, over the rows before it in the cache"""
        begin = jnp.minimum(length, count - 1)
        rows = jnp.roll(jnp.asarray(x, jnp.float32), -begin, axis=0)[None]
        valid = jnp.arange(count)[None] < count - begin
        place = begin + jnp.arange(count, dtype=jnp.int32)[None]
        known, zero = Rows(place, valid, causal_words(valid), length[None]), jnp.int32(0)
        own = jnp.zeros((1, 1, count, cache.shape[3]))
        attended, latents = module.attend(rows[0], view_of(known, config, 3), own, cache, Place(zero))
        return attended.total(jnp.dtype(jnp.float32)), latents[0]

    cache = jnp.full((1, 1, count, config.kv_lora_rank + config.qk_rope_head_dim), jnp.nan)
    whole, latents = attend(cache, jnp.int32(0))
    np.testing.assert_allclose(whole, wanted, atol=2e-6)
    for committed in (1, 5, 11):
        found, _ = attend(cache.at[0, :, :committed].set(latents[:, :committed]), jnp.int32(committed))
        np.testing.assert_allclose(found[: count - committed], wanted[committed:], atol=2e-6)


def test_router_is_a_full_sort_whose_bias_only_chooses(pair) -> None:
    """384 experts as in K2.6: float32 logits, the bias in the choice alone, weights that sum to the scaling
    factor.
    """
    random = np.random.default_rng(5)
    x, router = random.standard_normal((40, 32)), random.standard_normal((384, 32)) * 32**-0.5
    bias = random.uniform(-0.05, 0.05, 384)
    single, place = lambda array: jnp.asarray(array, jnp.float32), Place(jnp.int32(0))
    made = stack_matmul(single(x), [single(router)[None], jnp.zeros((1, 2, 32))], place)
    chosen = expert_choice(made, single(bias)[None], place, Router(8, True, 2.827), jnp.dtype(jnp.float32))
    ids, weights = map(np.asarray, chosen[:2])
    wanted_ids, wanted = reference.route(x, router, bias, 8, 2.827)
    order = np.argsort(ids, axis=-1)
    assert np.array_equal(np.take_along_axis(ids, order, -1), wanted_ids)
    np.testing.assert_allclose(np.take_along_axis(weights, order, -1), wanted, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), 2.827, rtol=1e-6)
    without, _ = reference.route(x, router, np.zeros(384), 8, 2.827)
    assert (without != wanted_ids).any()  # so the bias mattered


def test_text_shapes_hold_the_references(texts) -> None:
    assert max(len(text["input_ids"]) for text in texts) <= TEXT_WIDTH
