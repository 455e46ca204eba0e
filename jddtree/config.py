"""What the models are: frozen dataclasses read from a checkpoint's config.json.

Nothing falls back silently: a field without a value in the file either has no effect on the result or ends the load with
a `UserError` that names the field. Field names are the Hugging Face ones, so that a reader finds them in the file.
Sources: Kimi K2.6's published config.json and the DFlash drafters' config.json.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jddtree.errors import UserError

TARGET_ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM")
TARGET_MODEL_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")
GROUP_SIZE = 32
VARIANT_FIELDS = {
    "projector_type": "a Domino or DSpark head",
    "markov_rank": "a DSpark Markov head",
    "conv_kernel_size": "DFlash 2 convolutions",
    "conv_group_size": "DFlash 2 convolutions",
    "selector_rank": "a DFlash 2 candidate selector",
    "selector_top_k": "a DFlash 2 candidate selector",
    "gru_hidden_dim": "a Domino GRU head",
    "emb_dim": "a Domino GRU head",
    "shift_label": "shifted labels",
    "sample_from_anchor": "anchor-first blocks (DSpark)",
    "query_zero_predicts_next": "anchor-first blocks (DSpark)",
    "pure_draft_prefix_len": "a draft prefix",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled attention values",
    "mask_embedding": "a mask embedding of its own",
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with YaRN scaling (arXiv 2309.00071); `factor` 1 is plain rope.

    dim: rotated dimensions. amplitude: what cos and sin are multiplied by.
    """

    dim: int
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0


@dataclass(frozen=True)
class TargetConfig:
    """A Kimi-K2.6-shaped language model (K2.6 config.json, `text_config`)."""

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


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash (v1) block-diffusion drafter (arXiv 2602.06036).

    block_size: rows of a block, the anchor included. target_layer_ids: 0-based target layers whose output is tapped.
    windows: per layer the sliding window in tokens, None for full attention; a row sees the `window` positions that end
    with its own. causal: per layer, whether a block row sees only the block rows up to itself.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope: Rope
    final_logit_softcapping: float | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a missing or broken file is a `UserError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object; download the file again")
    return value


class _Fields:
    """Typed look-ups in one JSON object; every complaint names the file and the field."""

    def __init__(self, values: dict[str, Any], path: Path):
        self.values, self.path = values, path

    def get(self, name: str, kind: type, **default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if "default" in default:
                return default["default"]
            raise UserError(f"{self.path}: field {name!r} is missing; the model cannot be built without it")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            found = type(value).__name__
            raise UserError(f"{self.path}: field {name!r} is {value!r} ({found}), but must be {kind.__name__}")
        return value

    def positive(self, name: str, **default: Any) -> int:
        value = self.get(name, int, **default)
        if value <= 0:
            raise UserError(f"{self.path}: field {name!r} is {value}, but must be at least 1")
        return value

    def require(self, name: str, wanted: Any, why: str) -> None:
        """Refuse a model whose field differs from the only value this project implements."""
        if (value := self.values.get(name, wanted)) != wanted:
            raise UserError(f"{self.path}: field {name!r} is {value!r}, but {why} needs {wanted!r}")


def target_config(directory: Path, *, latent_norm_eps: float | None = None) -> TargetConfig:
    """Read `directory/config.json` of a Kimi K2.6 checkpoint.

    latent_norm_eps: eps of the norms after q_a and kv_a; None takes rms_norm_eps as production engines do, while
    transformers and the published model code use 1e-6 there.
    Raises UserError for another architecture, a missing or mistyped field and an unknown quantisation.
    """
    path = Path(directory) / "config.json"
    outer = read_json(path)
    text = outer.get("text_config", outer)
    _check_architecture(outer, text, path)
    fields = _Fields(text, path)
    _check_quantisation(outer.get("quantization_config") or text.get("quantization_config"), path)
    fields.require("hidden_act", "silu", "the expert kernel")
    fields.require("scoring_func", "sigmoid", "the router")
    fields.require("n_group", 1, "the router (one group of experts)")
    fields.require("topk_group", 1, "the router (one group of experts)")
    fields.require("moe_layer_freq", 1, "the layer loop")
    fields.require("attention_bias", False, "the attention")
    tied = outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if tied:
        raise UserError(f"{path}: tie_word_embeddings is {tied}, but Kimi K2.6 has a head of its own (false)")
    rope, amplitude_squared = _target_rope(fields)
    nope, rope_dim = fields.positive("qk_nope_head_dim"), rope.dim
    eps = fields.get("rms_norm_eps", float)
    dense = fields.get("first_k_dense_replace", int)
    layers = fields.positive("num_hidden_layers")
    if not 0 <= dense < layers:
        raise UserError(f"{path}: first_k_dense_replace is {dense}, but must be at least 0 and below {layers} layers")
    return TargetConfig(
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        intermediate_size=fields.positive("intermediate_size"),
        moe_intermediate_size=fields.positive("moe_intermediate_size"),
        n_routed_experts=fields.positive("n_routed_experts"),
        n_shared_experts=fields.positive("n_shared_experts"),
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        routed_scaling_factor=fields.get("routed_scaling_factor", float),
        norm_topk_prob=fields.get("norm_topk_prob", bool),
        num_attention_heads=fields.positive("num_attention_heads"),
        q_lora_rank=fields.positive("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.positive("v_head_dim"),
        rms_norm_eps=eps,
        latent_norm_eps=eps if latent_norm_eps is None else latent_norm_eps,
        softmax_scale=(nope + rope_dim) ** -0.5 * amplitude_squared,
        rope=rope,
        max_position_embeddings=fields.positive("max_position_embeddings"),
        eos_token_ids=_token_ids(outer.get("eos_token_id"), text.get("eos_token_id")),
        has_vision="vision_config" in outer,
    )


def _check_architecture(outer: dict[str, Any], text: dict[str, Any], path: Path) -> None:
    names, model_type = outer.get("architectures") or [], outer.get("model_type")
    known = any(name in TARGET_ARCHITECTURES for name in names) or model_type in TARGET_MODEL_TYPES
    if not known or text.get("model_type", "kimi_k2") not in TARGET_MODEL_TYPES:
        raise UserError(
            f"{path}: architecture {names} (model_type {model_type!r}, text model_type {text.get('model_type')!r}) is not "
            f"known; give a Kimi K2.6 checkpoint ({TARGET_ARCHITECTURES[0]}, model_type {TARGET_MODEL_TYPES[0]!r})"
        )


def _check_quantisation(quantisation: dict[str, Any] | None, path: Path) -> None:
    if quantisation is None:
        raise UserError(f"{path}: no quantization_config, neither at the top nor in text_config; give the INT4 release")
    found = (quantisation.get("quant_method"), quantisation.get("format"))
    if found != ("compressed-tensors", "pack-quantized"):
        raise UserError(f"{path}: quantisation is {found}, but must be ('compressed-tensors', 'pack-quantized')")
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}
    for name, group in (quantisation.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        for key, value in wanted.items():
            if weights.get(key) != value:
                raise UserError(f"{path}: {name}.weights.{key} is {weights.get(key)!r}, but the experts need {value!r}")


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Union of single ids, lists of ids and None, ascending."""
    flat = [item for value in values if value is not None for item in (value if isinstance(value, list) else [value])]
    return tuple(sorted(set(flat)))


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 m ln s + 1 (YaRN, section 3.4), and 1 where nothing is scaled."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _rope_fields(values: dict[str, Any], path: Path) -> tuple[float, _Fields]:
    """theta and the scaling object, from `rope_scaling` + `rope_theta` or from `rope_parameters`."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling")
    scaling = {} if scaling is None else scaling
    theta = values.get("rope_theta", scaling.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise UserError(f"{path}: field 'rope_theta' is {theta!r}; the rotation cannot be built without it")
    return float(theta), _Fields(scaling, path)


def _yarn(dim: int, theta: float, scaling: _Fields, amplitude: float | None) -> Rope:
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return Rope(dim, theta)
    if kind != "yarn":
        raise UserError(f"{scaling.path}: rope type is {kind!r}, but must be 'yarn' or 'default'")
    factor = scaling.get("factor", float)
    mscale, all_dim = scaling.get("mscale", float, default=1.0), scaling.get("mscale_all_dim", float, default=0.0)
    if amplitude is None:
        ratio = yarn_mscale(factor, mscale) / (yarn_mscale(factor, all_dim) if all_dim else 1.0)
        amplitude = scaling.get("attention_factor", float, default=ratio)
    return Rope(
        dim=dim,
        theta=theta,
        factor=factor,
        original_positions=scaling.positive("original_max_position_embeddings"),
        beta_fast=scaling.get("beta_fast", float, default=32.0),
        beta_slow=scaling.get("beta_slow", float, default=1.0),
        amplitude=amplitude,
    )


def _target_rope(fields: _Fields) -> tuple[Rope, float]:
    """The rotation, and the square of mscale_all_dim's amplitude that enters the softmax scale."""
    theta, scaling = _rope_fields(fields.values, fields.path)
    rope = _yarn(fields.positive("qk_rope_head_dim"), theta, scaling, None)
    all_dim = scaling.get("mscale_all_dim", float, default=0.0)
    return rope, yarn_mscale(rope.factor, all_dim) ** 2 if all_dim else 1.0


def drafter_config(
    directory: Path,
    *,
    rope_amplitude: float | None = None,
    causal_in_window: bool | None = None,
    window_offset: int = 0,
    tap_offset: int = 0,
) -> DrafterConfig:
    """Read `directory/config.json` of a DFlash (v1) drafter.

    The switches are those on which public engines disagree for the same checkpoint, to be settled by acceptance:
    rope_amplitude: factor of cos and sin; None follows mscale / mscale_all_dim or attention_factor of the file.
    causal_in_window: whether sliding layers are causal inside the block; None follows the file, else causal.
    window_offset: added to the window (0: a row's window of `sliding_window` positions ends with its own).
    tap_offset: added to every target layer id (0 is right for checkpoints that list layer outputs from 0).
    Raises UserError for another variant (v2, DSpark, Domino), and for a missing or mistyped field.
    """
    path = Path(directory) / "config.json"
    values = read_json(path)
    nested = values.get("dflash_config") or {}
    _check_variant(values, nested, path)
    fields, inner = _Fields(values, path), _Fields(nested, path)
    fields.require("hidden_act", "silu", "the drafter")
    fields.require("attention_bias", False, "the drafter")
    layers = fields.positive("num_hidden_layers")
    taps = tuple(tap + tap_offset for tap in inner.get("target_layer_ids", list))
    num_target_layers = fields.positive("num_target_layers")
    _check_taps(taps, num_target_layers, path)
    block = inner.values.get("block_size", values.get("block_size"))
    if type(block) is not int or block < 2:
        raise UserError(f"{path}: field 'block_size' is {block!r}, but must be an integer of at least 2")
    vocab, mask = fields.positive("vocab_size"), inner.get("mask_token_id", int)
    if not 0 <= mask < vocab:
        raise UserError(f"{path}: mask_token_id is {mask}, but must be at least 0 and below vocab_size {vocab}")
    windows = _windows(fields, layers, window_offset)
    theta, scaling = _rope_fields(values, path)
    head_dim = fields.positive("head_dim")
    return DrafterConfig(
        vocab_size=vocab,
        hidden_size=fields.positive("hidden_size"),
        num_hidden_layers=layers,
        intermediate_size=fields.positive("intermediate_size"),
        num_attention_heads=fields.positive("num_attention_heads"),
        num_key_value_heads=fields.positive("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=fields.get("rms_norm_eps", float),
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=num_target_layers,
        windows=windows,
        causal=_causal(values, nested, windows, causal_in_window),
        rope=_yarn(head_dim, theta, scaling, rope_amplitude),
        final_logit_softcapping=fields.get("final_logit_softcapping", float, default=None),
    )


def _check_variant(values: dict[str, Any], nested: dict[str, Any], path: Path) -> None:
    names = values.get("architectures") or []
    if names != ["DFlashDraftModel"]:
        raise UserError(f"{path}: architecture is {names}, but only ['DFlashDraftModel'] (DFlash v1) is supported")
    for name, meaning in VARIANT_FIELDS.items():
        value = nested.get(name, values.get(name))
        if value not in (None, False):
            raise UserError(f"{path}: {name} is {value!r} ({meaning}), but only DFlash v1 is supported; give a v1 drafter")
    for name in ("output_multiplier", "input_embedding_scale"):
        if (value := nested.get(name, values.get(name))) not in (None, 1, 1.0):
            raise UserError(f"{path}: {name} is {value!r}, but only 1.0 is supported; give a drafter made for Kimi")


def _check_taps(taps: tuple[int, ...], num_target_layers: int, path: Path) -> None:
    ascending = all(type(tap) is int for tap in taps) and list(taps) == sorted(set(taps))
    if not taps or not ascending or taps[0] < 0 or taps[-1] >= num_target_layers - 1:
        raise UserError(
            f"{path}: target_layer_ids is {list(taps)}, but must be ascending layers from 0 to {num_target_layers - 2} "
            "(the last layer's output has no tap)"
        )


def _windows(fields: _Fields, layers: int, offset: int) -> tuple[int | None, ...]:
    kinds = fields.get("layer_types", list, default=["full_attention"] * layers)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UserError(f"{fields.path}: layer_types is {kinds}, but must name full_attention or sliding_attention "
                        f"for each of {layers} layers")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = fields.positive("sliding_window") + offset
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(values: dict[str, Any], nested: dict[str, Any], windows: tuple[int | None, ...], override: bool | None):
    """Full layers see the whole block unless the file says causal; sliding ones are causal unless something says not."""
    named = [source[name] for source in (nested, values) for name in ("is_causal", "causal") if name in source]
    if named:
        override = bool(named[0]) if override is None else override
    explicit = bool(named and named[0])
    return tuple(explicit if window is None else (True if override is None else override) for window in windows)


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise UserError when the drafter was made for another target."""
    for name, ours, theirs in (
        ("num_target_layers", drafter.num_target_layers, target.num_hidden_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise UserError(f"the drafter is for another target: its {name} is {ours}, the target has {theirs}; "
                            "give the drafter that was trained with this target")
