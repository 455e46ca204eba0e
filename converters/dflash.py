"""DFlash (v1) drafter: Hugging Face tensors to the drafter's arrays.

Names may carry the prefix `model.`; one or more shards. A drafter of another kind is refused by what it is called.
Tensor names and shapes: the published Kimi drafters; embedding and head are the target's and not in the folder.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from converters.checkpoint import Array, Checkpoint, Progress, Report, differences, mismatch
from jddtree.config import DrafterConfig
from jddtree.errors import UserError
from jddtree.models.parameters import drafter_parameters

PREFIX = "model."
GLOBAL_NAMES = {"fc": "fc.weight", "hidden_norm": "hidden_norm.weight", "norm": "norm.weight"}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "mlp_gate": "mlp.gate_proj.weight",
    "mlp_up": "mlp.up_proj.weight",
    "mlp_down": "mlp.down_proj.weight",
}
# part of a tensor name: what a drafter with such a tensor is
VARIANTS = {
    "attention_conv": "DFlash 2, convolutions",
    "mlp_conv": "DFlash 2, convolutions",
    "candidate_selector": "DFlash 2, a candidate selector",
    "markov": "DSpark, a Markov head",
    "confidence": "DSpark, a confidence head",
    "gru": "Domino, a GRU head",
    "domino": "Domino",
    "layer_fusion": "DFlare, fused taps",
    "kv_a_proj": "latent attention",
    "kv_b_proj": "latent attention",
    "sink": "attention sinks",
    "mask_embedding": "a mask embedding of its own",
    "embed_tokens": "an embedding of its own",
    "lm_head": "a head of its own",
    "d2t": "a reduced vocabulary",
    "t2d": "a reduced vocabulary",
    "bias": "biases",
    "weight_packed": "quantised weights",
    "weight_scale": "quantised weights",
}
ALSO = {"weight": "F32"}  # drafters fresh from training; cast like the rest


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of a drafter without prefix: name to (safetensors dtype, shape)."""
    return {
        name: ("BF16", table.shape if layer is None else table.shape[1:])
        for path, table in drafter_parameters(config).items()
        for layer, name in _names(path, config)
    }


def load_drafter(
    directory: Path, config: DrafterConfig, dtype: npt.DTypeLike, *, progress: Progress | None = None
) -> tuple[dict[str, Array], Report]:
    """Read a drafter folder into the arrays of `drafter_parameters(config)`, by dotted path.

    dtype: of all arrays, ml_dtypes.bfloat16 or numpy.float32; tensors may be bfloat16 or float32.
    progress: called with (bytes done, bytes in all).
    Raises UserError for a broken folder (`Checkpoint`), another kind of drafter, an `fc` for another number of taps,
    and one that lists all tensors that are missing, unexpected, of the wrong shape or type.
    """
    checkpoint = Checkpoint(directory)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in checkpoint.entries) else ""
    _check_variant(checkpoint)
    _check_taps(checkpoint, prefix, config)
    expected = {prefix + name: value for name, value in expected_tensors(config).items()}
    if phrases := differences(checkpoint.entries, expected, ALSO):
        raise mismatch(checkpoint.directory, phrases)
    table = drafter_parameters(config)
    arrays: dict[str, Array] = {path: np.empty(entry.shape, dtype) for path, entry in table.items()}
    total, done = sum(entry.nbytes for entry in checkpoint.entries.values()), 0
    for path, array in arrays.items():
        for layer, name in _names(path, config):
            array[... if layer is None else layer] = checkpoint.read(prefix + name)
            done += checkpoint.entries[prefix + name].nbytes
            if progress is not None:
                progress(done, total)
    parameters = sum(array.size for array in arrays.values())
    memory = sum(array.nbytes for array in arrays.values())
    return arrays, Report(checkpoint.shards, len(expected), parameters, total, memory, notes=checkpoint.notes)


def _names(path: str, config: DrafterConfig) -> list[tuple[int | None, str]]:
    """(layer, tensor name) of each tensor that one array is stacked from."""
    if path in GLOBAL_NAMES:
        return [(None, GLOBAL_NAMES[path])]
    name = LAYER_NAMES[path.removeprefix("layers.")]
    return [(layer, f"layers.{layer}.{name}") for layer in range(config.num_hidden_layers)]


def _check_variant(checkpoint: Checkpoint) -> None:
    for part, meaning in VARIANTS.items():
        names = [name for name in checkpoint.entries if part in name]
        if names:
            raise UserError(
                f"{checkpoint.directory} holds {names[0]} ({meaning}), but only DFlash v1 is supported; "
                "give a v1 drafter"
            )


def _check_taps(checkpoint: Checkpoint, prefix: str, config: DrafterConfig) -> None:
    entry = checkpoint.entries.get(f"{prefix}fc.weight")
    taps, width = len(config.target_layer_ids), len(config.target_layer_ids) * config.hidden_size
    if entry is not None and len(entry.shape) == 2 and entry.shape[1] != width:
        raise UserError(
            f"{checkpoint.directory}: fc.weight has {entry.shape[1]} columns, but the {taps} target_layer_ids of "
            f"config.json need {width} ({taps} x hidden_size {config.hidden_size}); give the config of this drafter"
        )
