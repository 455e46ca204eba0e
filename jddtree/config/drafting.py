"""`DFlashConfig` from the config.json of a DFlash (v1) checkpoint (source: the published drafters)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jddtree.config.fields import Fields, agreed, check_dtype, read_json
from jddtree.config.known_fields import check_known
from jddtree.config.rotation import Rope, read_rope
from jddtree.errors import UserError

DRAFTER_ARCHITECTURE = "DFlashDraftModel"
MASK_FILE = "mask_embedding.pt"
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
    "mask_embedding": "a mask embedding of its own",
    "kv_lora_rank": "latent attention",
}
NEUTRAL_FIELDS = ("output_multiplier", "input_embedding_scale", "attention_value_scale")
ATTENTION_MODES = ("gqa", "mha")
NESTED_FIELDS = (
    "target_layer_ids",
    "mask_token_id",
    "mask_token",
    "block_size",
    "num_target_layers",
    "causal",
    "is_causal",
    "final_logit_softcapping",
    "attention_mode",
    *VARIANT_FIELDS,
    *NEUTRAL_FIELDS,
)
MODEL_FIELDS = tuple(
    "dflash_config vocab_size draft_vocab_size hidden_size target_hidden_size num_hidden_layers "
    "intermediate_size "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act attention_bias mlp_bias dtype "
    "torch_dtype layer_types sliding_window use_sliding_window max_window_layers max_position_embeddings "
    "rope_theta rope_scaling rope_parameters rope_interleave partial_rotary_factor "
    "eos_token_id tie_word_embeddings".split()  # of which it has neither: ends and head are the target's
)
LAYERS = 1024  # so that a broken file cannot ask for tables without end
BLOCK = 128  # rows; published drafters have 7 to 32


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash (v1) block-diffusion drafter (arXiv 2602.06036).

    block_size: rows of a block, the anchor included. target_layer_ids: 0-based target layers whose output is
    tapped. windows: per layer the sliding window in tokens, None for full attention; a row sees the `window`
    positions that end with its own. causal: per layer, whether a block row sees only the block rows up to
    itself.
    """

    kind: ClassVar[str] = "dflash"
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

    @property
    def most_candidates(self) -> int:
        """See `jddtree.drafter_kinds.DrafterConfig`; any token."""
        return self.vocab_size

    def of_target(self) -> dict[str, tuple[str, int]]:
        """See `jddtree.drafter_kinds.DrafterConfig`."""
        return {
            "num_target_layers": ("num_hidden_layers", self.num_target_layers),
            "hidden_size": ("hidden_size", self.hidden_size),
            "vocab_size": ("vocab_size", self.vocab_size),
        }


def dflash_config(
    directory: Path,
    *,
    rope_amplitude: float | None = None,
    causal_in_window: bool | None = None,
    window_offset: int = 0,
    tap_offset: int = 0,
) -> DFlashConfig:
    """Read `directory/config.json` of a DFlash (v1) drafter.

    The switches are those on which public engines disagree for the same checkpoint, to be settled by
    acceptance: rope_amplitude: factor of cos and sin; None follows attention_factor or mscale /
    mscale_all_dim of the file. causal_in_window: whether sliding layers are causal inside the block; None
    follows the file, else causal. window_offset: added to the window (0: a row's window of `sliding_window`
    positions ends with its own). tap_offset: added to every target layer id (0 is right for checkpoints that
    list layer outputs from 0).

    block_size counts the anchor, as in z-lab's checkpoints. Some trainers (TorchSpec) store the number of
    drafts, one less, in the same field; a file does not show which it is. Raises UserError for another
    variant (v2, DSpark, Domino), for a missing, mistyped or unknown field, and where two fields contradict
    each other.
    """
    path = Path(directory) / "config.json"
    fields = Fields(read_json(path), path)
    inner = fields.section("dflash_config")
    _check_variant(fields, inner)
    fields.require("hidden_act", "silu", "the drafter", present=True)
    fields.require("attention_bias", False, "the drafter")
    fields.require("mlp_bias", False, "the drafter")
    fields.require("rope_interleave", False, "the drafter, which rotates in half-split order,")
    check_dtype(fields, ("bfloat16", "float32"))
    layers = fields.at_most("num_hidden_layers", LAYERS)
    vocab, head_dim = fields.positive("vocab_size"), fields.positive("head_dim")
    fields.require("draft_vocab_size", vocab, "a drafter that shares the target's head")
    fields.require(
        "target_hidden_size", fields.positive("hidden_size"), "a drafter that shares the target's head"
    )
    num_target_layers = agreed("num_target_layers", fields, inner).positive("num_target_layers")
    windows = _windows(fields, layers, window_offset)
    return DFlashConfig(
        vocab_size=vocab,
        hidden_size=fields.positive("hidden_size"),
        num_hidden_layers=layers,
        intermediate_size=fields.positive("intermediate_size"),
        num_attention_heads=_query_heads(fields),
        num_key_value_heads=fields.positive("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=fields.positive("rms_norm_eps", float),
        block_size=_block_size(fields, inner),
        mask_token_id=_mask_token_id(fields, inner, vocab),
        target_layer_ids=_taps(fields, inner, num_target_layers, tap_offset),
        num_target_layers=num_target_layers,
        windows=windows,
        causal=_causal(fields, inner, windows, causal_in_window),
        rope=read_rope(fields, head_dim, rope_amplitude)[0],
        final_logit_softcapping=agreed("final_logit_softcapping", inner, fields).positive(
            "final_logit_softcapping", float, default=None
        ),
    )


def _check_variant(fields: Fields, inner: Fields) -> None:
    """Refuse by name everything that DFlash v1 does not have."""
    names = fields.values.get("architectures", [])
    if names != [DRAFTER_ARCHITECTURE]:
        raise UserError(
            f"{fields.path}: architecture is {names}, but only ['{DRAFTER_ARCHITECTURE}'] (DFlash v1) is "
            "supported; give a v1 drafter"
        )
    fields.require("model_type", "qwen3", "the drafter")
    for place in (inner, fields):
        for name, meaning in VARIANT_FIELDS.items():
            if place.values.get(name) not in (None, False, 0):  # 0: a head of no size
                raise place.error(name, f"({meaning}), but only DFlash v1 is supported; give a v1 drafter")
        for name in NEUTRAL_FIELDS:
            place.require(name, 1.0, "a drafter made for Kimi")
        if place.values.get("attention_mode", ATTENTION_MODES[0]) not in ATTENTION_MODES:
            raise place.error(
                "attention_mode", "but only grouped-query attention is supported; give a v1 drafter"
            )
    inner.reject_others(NESTED_FIELDS, "which is not known; remove it if it does not change the result")
    check_known(fields, (*MODEL_FIELDS, *NESTED_FIELDS))
    if (mask := fields.path.parent / MASK_FILE).exists():
        raise UserError(
            f"{mask}: a mask embedding of its own, but only DFlash v1 is supported; give a v1 drafter"
        )


def _query_heads(fields: Fields) -> int:
    heads: int = fields.positive("num_attention_heads")
    if heads % (groups := fields.positive("num_key_value_heads")):
        raise fields.error("num_attention_heads", f"but must be a multiple of num_key_value_heads {groups}")
    return heads


def _block_size(fields: Fields, inner: Fields) -> int:
    place = agreed("block_size", inner, fields)
    value: int = place.get("block_size", int)
    if value < 2:
        raise place.error("block_size", "but must be at least 2, the anchor and one draft")
    return place.at_most("block_size", BLOCK)


def _mask_token_id(fields: Fields, inner: Fields, vocab: int) -> int:
    place = agreed("mask_token_id", inner, fields)
    if "mask_token_id" not in place:
        text = next((f" (of {p.values['mask_token']!r})" for p in (inner, fields) if "mask_token" in p), "")
        raise inner.error("mask_token_id", f"but the block cannot be built without it; add the id{text}")
    value: int = place.get("mask_token_id", int)
    if not 0 <= value < vocab:
        raise place.error("mask_token_id", f"but must be at least 0 and below vocab_size {vocab}")
    return value


def _taps(fields: Fields, inner: Fields, num_target_layers: int, offset: int) -> tuple[int, ...]:
    """Target layers whose output is tapped; the order is that of fc's columns."""
    agreed("target_layer_ids", inner, fields)
    listed = inner.get("target_layer_ids", list)
    if not listed or not all(type(tap) is int for tap in listed) or listed != sorted(set(listed)):
        raise inner.error("target_layer_ids", "but must be ascending layer numbers")
    taps = tuple(tap + offset for tap in listed)
    if taps[0] < 0 or taps[-1] >= num_target_layers - 1:
        moved = f" with tap_offset {offset}" if offset else ""
        raise inner.error(
            "target_layer_ids",
            f"but{moved} must be from 0 to {num_target_layers - 2} (the last layer's output has no tap)",
        )
    return taps


def _windows(fields: Fields, layers: int, offset: int) -> tuple[int | None, ...]:
    """Per layer; from layer_types, else as Qwen3 derives them from use_sliding_window and
    max_window_layers.
    """
    use = fields.get("use_sliding_window", bool, default=None)
    if "layer_types" in fields:
        kinds = fields.get("layer_types", list)
        if len(kinds) != layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
            raise fields.error(
                "layer_types",
                f"but must name full_attention or sliding_attention for each of {layers} layers",
            )
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
        if any(sliding) and use is False:
            raise fields.error(
                "use_sliding_window",
                "but layer_types names sliding_attention; set it to true, or the layers to full",
            )
    elif use:
        first = fields.get("max_window_layers", int)
        sliding = tuple(layer >= first for layer in range(layers))
    elif use is None and "sliding_window" in fields:
        raise fields.error(
            "sliding_window", "but neither layer_types nor use_sliding_window says where; add layer_types"
        )
    else:
        sliding = (False,) * layers
    if not any(sliding):
        return (None,) * layers
    if (window := fields.positive("sliding_window") + offset) < 1:
        raise fields.error("sliding_window", f"but with window_offset {offset} must be above 0")
    return tuple(window if slides else None for slides in sliding)


def _causal(
    fields: Fields, inner: Fields, windows: tuple[int | None, ...], override: bool | None
) -> tuple[bool, ...]:
    """Full layers see the whole block unless the file says causal; sliding ones are causal unless told
    otherwise.
    """
    named = {
        place.label(name): place.get(name, bool)
        for place in (inner, fields)
        for name in ("is_causal", "causal")
        if name in place
    }
    if len(set(named.values())) > 1:
        raise UserError(f"{fields.path}: {named} contradict each other; keep the right one")
    explicit: Any = next(iter(named.values()), None)
    in_window = next(value for value in (override, explicit, True) if value is not None)
    return tuple(bool(explicit) if window is None else in_window for window in windows)
