"""The target in bfloat16, in plain NumPy: rounded where the model rounds, sums in float32 in an order of
one's choice.

Written beside the model, from which it takes the configuration and rotary frequencies only. Weights are
unpacked, attention is one softmax over a text's own keys, and experts are a loop. Arrays are float32 that
hold bfloat16 numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from whole_packing import unpack_down, unpack_gate_up

from jddtree.config import TargetConfig
from jddtree.models.rope import inverse_frequencies

Array = np.ndarray
Layer = dict[str, Array]
Product = Callable[[Array, Array], Array]  # x [T, K] and weight [N, K] -> float32 [T, N], not rounded


def rounded(x: Array) -> Array:
    """The nearest bfloat16 numbers."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def in_order(seed: int) -> Product:
    """Products whose terms are shuffled before they are added in float32."""
    random = np.random.default_rng(seed)

    def product(x: Array, weight: Array) -> Array:
        order = random.permutation(x.shape[1])
        return x[:, order] @ weight[:, order].T

    return product


class Rounded:
    """The model of a parameter tree in bfloat16; product: how its products are summed."""

    def __init__(self, config: TargetConfig, weights: dict[str, Any], product: Product):
        self.config, self.product = config, product
        self.weights = weights

    def log_probabilities(self, texts: Sequence[Sequence[int]]) -> list[Array]:
        """float32 [T, V] of each text, from position 0; the rows of all texts stand in one matrix."""
        ends = np.cumsum([len(text) for text in texts])[:-1]
        positions = np.concatenate([np.arange(len(text)) for text in texts])
        x = self.weights["embed"][np.concatenate(texts)]
        for layer in self.weights["layers"]:
            x = rounded(
                x + rounded(self.attention(self.norm(x, layer["input_norm"]), layer, positions, ends))
            )
            x = rounded(x + rounded(self.feed_forward(self.norm(x, layer["post_norm"]), layer)))
        logits = self.product(self.norm(x, self.weights["norm"]), self.weights["head"])
        logits -= logits.max(-1, keepdims=True)
        return np.split(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ends)

    def norm(self, x: Array, weight: Array) -> Array:
        """RMS norm, rounded once."""
        return normed(x, weight, self.config.rms_norm_eps)

    def attention(self, x: Array, layer: Layer, positions: Array, ends: Array) -> Array:
        """Absorbed latent attention, causal within each text, [T, H], not rounded."""
        latent, eps = self.config.kv_lora_rank, self.config.latent_norm_eps
        low = normed(rounded(self.product(x, layer["q_a"])), layer["q_a_norm"], eps)
        made = rounded(self.product(x, layer["kv_a"]))
        rotated = self.turned(made[:, None, latent:], positions)[:, 0]
        keys = np.concatenate([normed(made[:, :latent], layer["kv_a_norm"], eps), rotated], 1)
        queries = self.queries(low, layer, positions)
        texts = zip(np.split(queries, ends), np.split(keys, ends), strict=True)
        out = np.concatenate([self.attended(*text) for text in texts])
        values = [rounded(self.product(out[:, head], factor)) for head, factor in enumerate(layer["v_up"])]
        return self.product(np.concatenate(values, 1), layer["o"])

    def queries(self, low: Array, layer: Layer, positions: Array) -> Array:
        """Of each head in the latent space, [T, heads, D + R]"""
        heads, nope = self.config.num_attention_heads, self.config.qk_nope_head_dim
        made = rounded(self.product(low, layer["q_b"])).reshape(len(low), heads, -1)
        content = [
            rounded(self.product(made[:, head, :nope], layer["k_up"][head].T)) for head in range(heads)
        ]
        return np.concatenate([np.stack(content, 1), self.turned(made[..., nope:], positions)], 2)

    def attended(self, queries: Array, keys: Array) -> Array:
        """Weighted latents of one text [T, heads, D]; weights are rounded before they are divided by their
        sum.
        """
        count, heads, width = queries.shape
        scores = self.product(queries.reshape(-1, width), keys).reshape(count, heads, count)
        sees = np.tri(count, dtype=bool)[:, None]
        scores = np.where(sees, scores * np.float32(self.config.softmax_scale), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True)).reshape(-1, count)
        values = self.product(rounded(weights), keys[:, : self.config.kv_lora_rank].T)
        return rounded(values / weights.sum(-1, keepdims=True)).reshape(count, heads, -1)

    def turned(self, x: Array, positions: Array) -> Array:
        """x [T, heads, R] rotated by position, in half-split order."""
        angles = positions.astype(np.float32)[:, None, None] * inverse_frequencies(self.config.rope)
        amplitude = np.float32(self.config.rope.amplitude)
        cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
        first, second = np.split(x, 2, axis=2)
        return rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], 2))

    def feed_forward(self, x: Array, layer: Layer) -> Array:
        """The dense block, or the shared and the routed experts, [T, H], not rounded."""
        if "mlp_gate" in layer:
            return self.gated(x, layer["mlp_gate"], layer["mlp_up"], layer["mlp_down"])
        ids, shares = self.routed(x, layer)
        total = self.gated(x, layer["shared_gate"], layer["shared_up"], layer["shared_down"])
        for expert, matrices in enumerate(zip(layer["gate"], layer["up"], layer["down"], strict=True)):
            rows, choice = np.nonzero(ids == expert)
            total[rows] += self.gated(x[rows], *matrices) * shares[rows, choice][:, None]
        return total

    def routed(self, x: Array, layer: Layer) -> tuple[Array, Array]:
        """Experts of each row and their weights, [T, k]; the bias takes part in the choice only."""
        scores = 1 / (1 + np.exp(-self.product(x, layer["router"])))
        ids = np.argsort(-(scores + layer["router_bias"]), -1, kind="stable")[
            :, : self.config.num_experts_per_tok
        ]
        chosen = np.take_along_axis(scores, ids, -1)
        return ids, chosen / chosen.sum(-1, keepdims=True) * np.float32(self.config.routed_scaling_factor)

    def gated(self, x: Array, gate: Array, up: Array, down: Array) -> Array:
        """down(silu(gate x) * up x), not rounded at the end."""
        opened = self.product(x, gate)
        return self.product(rounded(opened / (1 + np.exp(-opened)) * self.product(x, up)), down)


def normed(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / rms(x), rounded once."""
    return rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight)


def plain_weights(tree: dict[str, Any], config: TargetConfig) -> dict[str, Any]:
    """A parameter tree of bfloat16 as NumPy arrays: the ends, and the arrays of each layer, its experts among
    them.
    """
    widen = lambda array: np.asarray(array).astype(np.float32)
    groups = [{name: widen(stack) for name, stack in tree[group].items()} for group in ("dense", "moe")]
    layers = [
        {name: stack[index] for name, stack in group.items()}
        for group in groups
        for index in range(len(group["o"]))
    ]
    experts, count = unpacked(tree["experts"]), config.n_routed_experts
    for index, layer in enumerate(layers[config.first_k_dense_replace :]):
        layer |= {name: matrices[index * count : (index + 1) * count] for name, matrices in experts.items()}
    return {name: widen(tree[name]) for name in ("embed", "norm", "head")} | {"layers": layers}


def unpacked(experts: dict[str, Any]) -> Layer:
    """The matrices of all experts of all layers: gate and up [E, I, H], down [E, H, I]"""
    packed = {name: np.asarray(array) for name, array in experts.items()}
    gate, gate_scale, up, up_scale = unpack_gate_up(packed["gate_up"], packed["gate_up_scale"])
    down = dequantised(*unpack_down(packed["down"], packed["down_scale"]))
    return {"gate": dequantised(gate, gate_scale), "up": dequantised(up, up_scale), "down": down}


def dequantised(words: Array, scale: Array) -> Array:
    """words int32 [E, N, K/8] and the bits of their scales uint16 [E, N, K/32] -> [E, N, K]"""
    codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.int32)) & 15
    scales = np.repeat(scale.view(ml_dtypes.bfloat16).astype(np.float32), 32, axis=-1)
    return rounded((codes.reshape(scales.shape) - 8).astype(np.float32) * scales)
