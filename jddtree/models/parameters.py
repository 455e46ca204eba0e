"""The table of the target's parameters: path, shape, dtype and the axis that a mesh splits.

A drafter's table is of the same form and stands beside its converter (`converters.dflash`).

A parameter tree is a nested dict of arrays; its paths are dotted here ("moe.q_b"). Layers of one kind are stacked along
the leading axis, so that a layer loop is one scan. Routed experts of all layers stand in one array whose leading axis
is layer * experts + expert: the loop passes an index and copies nothing (design, section 5).

Differences from the Hugging Face tensors, all made while reading a checkpoint:
* the rotary rows of q_b and kv_a are in half-split order (even dimensions first), so the cache is too;
* kv_b is split per head into k_up and v_up, the two factors of the absorbed form;
* experts are in the tile order of `converters.packing`.
Router weights are bfloat16 in checkpoints and stay so: a product of bfloat16 numbers is exact in float32, where logits
are summed.
"""

from dataclasses import dataclass, replace
from typing import Any

from jddtree.config import TargetConfig

Tree = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One array. dtype: "compute" (bfloat16 or float32, chosen at load), "float32" or "int32" (packed INT4 and scales).

    split: the axis divided over the ranks of a mesh; None is replicated. unit: entries of that axis that stay together
    (the rows of a head). Where ranks * unit does not divide it, a mesh pads with zeros, which change nothing.
    """

    shape: tuple[int, ...]
    dtype: str = "compute"
    split: int | None = None
    unit: int = 1


def target_parameters(config: TargetConfig) -> dict[str, Parameter]:
    """The target's parameters by dotted path."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table = {
        "embed": Parameter((vocab, hidden), split=0),
        "norm": Parameter((hidden,)),
        "head": Parameter((vocab, hidden), split=0),
    }
    if config.first_k_dense_replace:
        dense = _attention(config) | gated_mlp("mlp", hidden, config.intermediate_size)
        table |= layer_stack("dense", config.first_k_dense_replace, dense)
    moe = _attention(config) | gated_mlp("shared", hidden, config.shared_intermediate_size)
    moe |= {
        "router": Parameter((config.n_routed_experts, hidden)),
        "router_bias": Parameter((config.n_routed_experts,), "float32"),
    }
    return table | layer_stack("moe", config.num_moe_layers, moe) | _experts(config)


def nest(flat: dict[str, Any]) -> Tree:
    """Dotted paths to a nested dict."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _attention(config: TargetConfig) -> dict[str, Parameter]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "input_norm": Parameter((hidden,)),
        "q_a": Parameter((config.q_lora_rank, hidden)),
        "q_a_norm": Parameter((config.q_lora_rank,)),
        "q_b": Parameter((heads * query, config.q_lora_rank), split=0, unit=query),
        "kv_a": Parameter((config.latent_size, hidden)),
        "kv_a_norm": Parameter((latent,)),
        "k_up": Parameter((heads, config.qk_nope_head_dim, latent), split=0),
        "v_up": Parameter((heads, config.v_head_dim, latent), split=0),
        "o": Parameter((hidden, heads * config.v_head_dim), split=1, unit=config.v_head_dim),
        "post_norm": Parameter((hidden,)),
    }


def gated_mlp(name: str, hidden: int, width: int) -> dict[str, Parameter]:
    """The three matrices of a gated MLP; a mesh splits its width."""
    return {
        f"{name}_gate": Parameter((width, hidden), split=0),
        f"{name}_up": Parameter((width, hidden), split=0),
        f"{name}_down": Parameter((hidden, width), split=1),
    }


def _experts(config: TargetConfig) -> dict[str, Parameter]:
    """Tile order: [expert, row tile, column tile, words]; scales hold two bfloat16 a word (`converters.packing`)."""
    count = config.num_moe_layers * config.n_routed_experts
    hidden, width = config.hidden_size, config.moe_intermediate_size
    return {
        "experts.gate_up": Parameter((count, width // 32, hidden // 32, 256), "int32", split=1, unit=2),
        "experts.gate_up_scale": Parameter((count, width // 32, hidden // 32, 32), "int32", split=1, unit=2),
        "experts.down": Parameter((count, hidden // 32, width // 32, 128), "int32", split=2, unit=2),
        "experts.down_scale": Parameter((count, hidden // 32, width // 64, 32), "int32", split=2),
    }


def layer_stack(name: str, layers: int, table: dict[str, Parameter]) -> dict[str, Parameter]:
    """The parameters of one layer stacked for `layers` of them, their paths below `name`."""

    def stacked(parameter: Parameter) -> Parameter:
        split = None if parameter.split is None else parameter.split + 1
        return replace(parameter, shape=(layers, *parameter.shape), split=split)

    return {f"{name}.{path}": stacked(parameter) for path, parameter in table.items()}
