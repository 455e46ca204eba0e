"""The least that a step must read, by component, and the time that follows.

`floor_ms` counts what the composed peer (`peers.rank_step`) reads, so that ratios compare: weights that the
step reads once, those of the distinct experts that its rows touch included, at 4.3 TB/s (the copy rate of an
H200); latents, activations and norms are not in it. The router counts in float32, as the peer reads it,
whatever is kept here. `floor_read_ms` adds the latents and takes the rate at which this card reads.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from jddtree.benchmarks.kernels.roofline import (
    FLOAT32,
    Ceilings,
    Sizes,
    attention_work,
    floor_us,
)
from jddtree.benchmarks.step.rank.presets import Models
from jddtree.benchmarks.step.rank.random_parameters import nbytes, rank_tables
from jddtree.models.parameters import Parameter

PEER_RATE = 4.3e12  # bytes per second
MB = 1e6
# Component to the last names of the parameters that it reads.
TARGET = {
    "q_a + kv_a": ("q_a", "kv_a"),
    "q_b": ("q_b",),
    "absorb": ("k_up",),
    "v_up": ("v_up",),
    "o": ("o",),
    "router": ("router",),
    "shared": ("shared_gate", "shared_up", "shared_down"),
    "dense": ("mlp_gate", "mlp_up", "mlp_down"),
    "head": ("head",),
}
EXPERTS = {"experts gate_up": ("gate_up", "gate_up_scale"), "experts down": ("down", "down_scale")}
DRAFT = ("q", "k", "v", "o", "mlp_gate", "mlp_up", "mlp_down")
CONTEXT = ("fc", "k", "v")


def stage_bytes(
    models: Models, world: int, dtype: jnp.dtype, touched: float, context: int
) -> dict[str, dict[str, int]]:
    """Bytes by stage and component for one rank of `world`.

    touched: distinct experts of a layer; context: committed tokens. "latents" is the cache that attention
    reads.
    """
    tables = rank_tables(models, world)
    target, config = tables["target"], models.target
    verify = {name: _sum(target, parts, dtype) for name, parts in TARGET.items()}
    verify["router"] = FLOAT32 * _count(target, TARGET["router"])
    share = touched / config.n_routed_experts
    experts = {path: one for path, one in target.items() if path.startswith("experts.")}
    verify |= {name: round(share * _sum(experts, parts, dtype)) for name, parts in EXPERTS.items()}
    verify |= {"latents": config.num_hidden_layers * context * config.latent_size * dtype.itemsize}
    layers = {path: one for path, one in tables["drafter"].items() if path.startswith("layers.")}
    cached = 2 * context * layers["layers.k"].shape[0] * layers["layers.k"].shape[1] * dtype.itemsize
    draft = {"draft layers": _sum(layers, DRAFT, dtype), "head": verify["head"], "draft cache": cached}
    return {
        "verify": {name: size for name, size in verify.items() if size},
        "draft": draft,
        "commit": {"draft context": _sum(tables["drafter"], CONTEXT, dtype)},
    }


def floor_ms(parts: Mapping[str, int]) -> float:
    """Milliseconds for what the peer's formula counts."""
    return (
        1e3 * sum(size for name, size in parts.items() if name not in ("latents", "draft cache")) / PEER_RATE
    )


def floor_read_ms(parts: Mapping[str, int], ceilings: Ceilings) -> float:
    """Milliseconds for all bytes at the rate at which this card reads."""
    return 1e3 * sum(parts.values()) / ceilings.read


def attention_floor_ms(models: Models, world: int, tokens: int, length: int, ceilings: Ceilings) -> float:
    """Milliseconds that attention of all layers takes at least on this card, over `length` committed tokens:
    reading the latents or multiplying, whichever is slower.
    """
    config = models.target
    sizes = Sizes(
        config.hidden_size,
        config.moe_intermediate_size // world,
        config.n_routed_experts,
        config.num_experts_per_tok,
        world,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    work = attention_work(sizes, tokens, length, sizes.rank_heads)
    return config.num_hidden_layers * floor_us(work, ceilings) / 1e3


def with_round(by_stage: Mapping[str, Mapping[str, int]], drafts: bool) -> dict[str, Mapping[str, int]]:
    """The stages, and "round", which is all of them; drafts: whether there is a drafter."""
    names = ("verify", "draft", "commit") if drafts else ("verify",)
    parts = {f"{stage} {name}": size for stage in names for name, size in by_stage[stage].items()}
    whole = {name.removeprefix("verify "): size for name, size in parts.items()}
    whole = {"draft cache" if name == "draft draft cache" else name: size for name, size in whole.items()}
    return dict(by_stage) | {"round": whole}


def prefill_operations(models: Models, world: int, tokens: int, context: int) -> int:
    """Operations of a chunk of `tokens` on one rank (a multiplication and an addition are two): matmuls of
    all weights that a token meets, the head left out, and attention in absorbed form over `context` committed
    tokens and half of the chunk.
    """
    config = models.target
    target = rank_tables(models, world)["target"]
    names = [name for component, parts in TARGET.items() if component != "head" for name in parts]
    weights = _count(target, names) + _count(rank_tables(models, world)["drafter"], CONTEXT)
    expert = 3 * config.hidden_size * config.moe_intermediate_size // world
    weights += config.num_moe_layers * config.num_experts_per_tok * expert
    heads = target["moe.k_up"].shape[1]
    width = config.latent_size + config.kv_lora_rank
    attention = config.num_hidden_layers * heads * width * (context + tokens // 2)
    return 2 * tokens * (weights + attention)


def _sum(table: Mapping[str, Parameter], names: tuple[str, ...], dtype: jnp.dtype) -> int:
    return sum(nbytes(one, dtype) for path, one in table.items() if path.rsplit(".", 1)[-1] in names)


def _count(table: Mapping[str, Parameter], names) -> int:
    total = 0
    for path, one in table.items():
        if path.rsplit(".", 1)[-1] in names:
            size = 1
            for length in one.shape:
                size *= length
            total += size
    return total
