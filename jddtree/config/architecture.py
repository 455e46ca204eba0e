"""The target: `TargetConfig` from the config.json of a Kimi K2.6 checkpoint (source: the published file)."""

from dataclasses import dataclass
from pathlib import Path

from jddtree.config.fields import Fields, check_dtype, read_json
from jddtree.config.known_fields import check_known
from jddtree.config.quantisation import check_quantisation
from jddtree.config.rotation import Rope, read_rope, yarn_mscale
from jddtree.errors import UserError

TARGET_ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM")
TARGET_MODEL_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")
TILE = 64  # expert rows and columns come in whole tiles (`converters.packing`)
LAYERS = 1024  # so that a broken file cannot ask for tables without end
EXPERTS = 1 << 17  # of all layers; K2.6 has 23040
EITHER_FIELDS = ("quantization_config", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
MODEL_FIELDS = tuple(
    "vocab_size hidden_size num_hidden_layers first_k_dense_replace intermediate_size "
    "moe_intermediate_size n_routed_experts num_local_experts n_shared_experts num_experts_per_tok "
    "routed_scaling_factor norm_topk_prob num_attention_heads num_key_value_heads q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim head_dim v_head_dim rms_norm_eps "
    "max_position_embeddings rope_theta rope_scaling rope_parameters rope_interleave "
    "partial_rotary_factor hidden_act n_group topk_group scoring_func topk_method moe_layer_freq "
    "attention_bias "
    "mlp_bias num_nextn_predict_layers".split()
)


@dataclass(frozen=True)
class TargetConfig:
    """A Kimi-K2.6-shaped language model (K2.6 config.json, `text_config`).

    vocab_size: rows of embedding and head. writable_ids: how many of them the tokenizer has; None is all. The
    ids from there on are padding of the vocabulary: never sampled, never drafted.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    latent_norm_eps: float
    softmax_scale: float
    rope: Rope
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    has_vision: bool
    writable_ids: int | None = None

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts; they follow the dense ones."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def latent_size(self) -> int:
        """Values that one token keeps in the cache of one layer: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert."""
        return self.moe_intermediate_size * self.n_shared_experts


def target_config(directory: Path, *, latent_norm_eps: float | None = None) -> TargetConfig:
    """Read `directory/config.json` of a Kimi K2.6 checkpoint. Every field in it is read, or known to change
    nothing.

    latent_norm_eps: eps of the norms after q_a and kv_a; None takes rms_norm_eps as production engines do,
    while transformers and the published model code use 1e-6 there. Raises UserError for another architecture,
    a missing, mistyped or unknown field and an unknown quantisation.
    """
    path = Path(directory) / "config.json"
    outer = Fields(read_json(path), path)
    fields = outer.section("text_config") if "text_config" in outer else outer
    _check_architecture(outer, fields)
    check_quantisation(outer, fields)
    _check_target(outer, fields)
    rope, mscale_all_dim = read_rope(fields, fields.positive("qk_rope_head_dim"))
    mscale = yarn_mscale(rope.factor, mscale_all_dim) if mscale_all_dim else 1.0
    nope, eps = fields.positive("qk_nope_head_dim"), fields.positive("rms_norm_eps", float)
    dense, layers = fields.get("first_k_dense_replace", int), fields.at_most("num_hidden_layers", LAYERS)
    if not 0 <= dense < layers:
        raise fields.error(
            "first_k_dense_replace", f"but must be at least 0 and below num_hidden_layers {layers}"
        )
    vocab = fields.positive("vocab_size")
    return TargetConfig(
        vocab_size=vocab,
        hidden_size=_whole_tiles(fields, "hidden_size"),
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        intermediate_size=fields.positive("intermediate_size"),
        moe_intermediate_size=_whole_tiles(fields, "moe_intermediate_size"),
        n_routed_experts=fields.at_most("n_routed_experts", EXPERTS // layers),
        n_shared_experts=fields.positive("n_shared_experts"),
        num_experts_per_tok=_experts_per_token(fields),
        routed_scaling_factor=fields.positive("routed_scaling_factor", float),
        norm_topk_prob=fields.get("norm_topk_prob", bool),
        num_attention_heads=fields.positive("num_attention_heads"),
        q_lora_rank=fields.positive("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope.dim,
        v_head_dim=fields.positive("v_head_dim"),
        rms_norm_eps=eps,
        latent_norm_eps=eps if latent_norm_eps is None else latent_norm_eps,
        softmax_scale=(nope + rope.dim) ** -0.5 * mscale**2,
        rope=rope,
        max_position_embeddings=fields.positive("max_position_embeddings"),
        eos_token_ids=_token_ids("eos_token_id", vocab, outer, fields),
        has_vision="vision_config" in outer,
    )


def _check_architecture(outer: Fields, text: Fields) -> None:
    names, model_type = outer.get("architectures", list, default=[]), outer.values.get("model_type")
    known = any(name in TARGET_ARCHITECTURES for name in names) or model_type in TARGET_MODEL_TYPES
    text_type = text.values.get("model_type", "kimi_k2")
    if not known or text_type not in TARGET_MODEL_TYPES:
        raise UserError(
            f"{outer.path}: architecture {names} (model_type {model_type!r}, text model_type "
            f"{text_type!r}) is not known; give a Kimi K2.6 checkpoint ({TARGET_ARCHITECTURES[0]}, "
            f"model_type {TARGET_MODEL_TYPES[0]!r})"
        )


def _check_target(outer: Fields, fields: Fields) -> None:
    """Refuse what this project does not compute; `present` where an absent field means something else
    elsewhere.
    """
    fields.require("hidden_act", "silu", "the expert kernel", present=True)
    fields.require("n_group", 1, "the router (one group of experts)", present=True)
    fields.require("topk_group", 1, "the router (one group of experts)", present=True)
    fields.require("scoring_func", "sigmoid", "the router")
    fields.require("topk_method", "noaux_tc", "the router")
    fields.require("moe_layer_freq", 1, "the layer loop")
    fields.require("attention_bias", False, "the attention")
    fields.require("mlp_bias", False, "the feed-forward blocks")
    fields.require("rope_interleave", True, "the loader, which takes rotary rows for interleaved pairs,")
    fields.require("num_nextn_predict_layers", 0, "the layer loop (drafting is done by a DFlash drafter)")
    for place in (outer, fields):
        place.require("tie_word_embeddings", False, "Kimi K2.6, which has a head of its own,")
        check_dtype(place, ("bfloat16",))
    _check_sums(fields)
    check_known(fields, (*MODEL_FIELDS, *EITHER_FIELDS))
    if fields is not outer:
        _check_outer(outer, fields)


def _check_sums(fields: Fields) -> None:
    """Fields that repeat others under another name. num_key_value_heads has no meaning in latent
    attention.
    """
    nope, rope = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    fields.require("head_dim", rope, "a rotation of qk_rope_head_dim dimensions")
    fields.require("qk_head_dim", nope + rope, "a key of qk_nope_head_dim and qk_rope_head_dim")
    fields.require("num_local_experts", fields.positive("n_routed_experts"), "a router over n_routed_experts")


def _check_outer(outer: Fields, text: Fields) -> None:
    """Fields beside text_config: those of the model must be text_config's too."""
    for name in MODEL_FIELDS:
        if name in outer and outer.values[name] != text.values.get(name):
            there = f"is {text.shown(name)}" if name in text else "is missing"
            raise outer.error(name, f"but field {text.label(name)!r} {there}; keep the right one there")
    check_known(outer, (*MODEL_FIELDS, *EITHER_FIELDS, "text_config"))


def _whole_tiles(fields: Fields, name: str) -> int:
    value: int = fields.positive(name)
    if value % TILE:
        raise fields.error(name, f"but must be a multiple of {TILE}, the tile of the packed experts")
    return value


def _experts_per_token(fields: Fields) -> int:
    value: int = fields.positive("num_experts_per_tok")
    if value > fields.positive("n_routed_experts"):
        raise fields.error(
            "num_experts_per_tok", f"above n_routed_experts {fields.values['n_routed_experts']}"
        )
    return value


def _token_ids(name: str, vocab: int, *places: Fields) -> tuple[int, ...]:
    """Union of ids and lists of ids in all places, ascending; at least one, all in the vocabulary."""
    ids: set[int] = set()
    for place in places:
        value = place.values.get(name, [])
        listed = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < vocab for item in listed):
            raise place.error(name, f"but must be token ids below vocab_size {vocab}")
        ids.update(listed)
    if not ids:
        raise places[0].error(name, "but generation could not stop without it")
    return tuple(sorted(ids))
