"""DFlash (v1) drafter: its parameter table, and Hugging Face tensors to its arrays.

Names may carry the prefix `model.`; one or more shards. A drafter of another kind is refused by what it is
called. Tensor names and shapes: the published Kimi drafters; embedding and head are the target's and not in
the folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converters.checkpoint import Array, Checkpoint, Progress, Report, differences, mismatch
from converters.drafters import Format
from converters.pieces import (
    STORED,
    Block,
    Index,
    count_weights,
    layout,
    map_rows,
    memory_bytes,
    read_all,
    row_blocks,
)
from jddtree.config import DFlashConfig, dflash_config
from jddtree.errors import UserError
from jddtree.models.parameters import Parameter, gated_mlp, layer_stack

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


def drafter_parameters(config: DFlashConfig) -> dict[str, Parameter]:
    """The drafter's parameters by dotted path; embedding and head are the target's."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    group = dim * (config.num_attention_heads // config.num_key_value_heads)
    layer = {
        "input_norm": Parameter((hidden,)),
        "q": Parameter((queries, hidden), split=0, unit=group),
        "k": Parameter((keys, hidden), split=0, unit=dim),
        "v": Parameter((keys, hidden), split=0, unit=dim),
        "o": Parameter((hidden, queries), split=1, unit=group),
        "q_norm": Parameter((dim,)),
        "k_norm": Parameter((dim,)),
        "post_norm": Parameter((hidden,)),
    } | gated_mlp("mlp", hidden, config.intermediate_size)
    return {
        "fc": Parameter((hidden, hidden * len(config.target_layer_ids)), split=1),
        "hidden_norm": Parameter((hidden,)),
        "norm": Parameter((hidden,)),
    } | layer_stack("layers", config.num_hidden_layers, layer)


def expected_tensors(config: DFlashConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of a drafter without prefix: name to (safetensors dtype, shape)."""
    return {
        name: ("BF16", table.shape if layer is None else table.shape[1:])
        for path, table in drafter_parameters(config).items()
        for layer, name in _names(path, config)
    }


def load_drafter(
    directory: Path, config: DFlashConfig, dtype: npt.DTypeLike, *, progress: Progress | None = None
) -> tuple[dict[str, Array], Report]:
    """Read a drafter folder into the arrays of `drafter_parameters(config)`, by dotted path.

    dtype: of all arrays, ml_dtypes.bfloat16 or numpy.float32; tensors may be bfloat16 or float32. progress:
    called with (bytes done, bytes in all). Raises UserError for a broken folder (`Checkpoint`), another kind
    of drafter, an `fc` for another number of taps, and one that lists all tensors that are missing,
    unexpected, of the wrong shape or type.
    """
    reader = DFlashReader(directory, config)
    return read_all(reader, dtype, progress=progress), reader.report(dtype)


class DFlashReader:
    """Slices of the drafter's arrays from its folder; a `TensorReader`.

    faults: the differences between the folder's tensors and those that the configuration needs, as phrases.
    Raises UserError as `load_drafter`; the one with all faults not when `check` is False.
    """

    def __init__(self, directory: Path, config: DFlashConfig, *, check: bool = True):
        self.checkpoint, self.config, self.table = Checkpoint(directory), config, drafter_parameters(config)
        entries = self.checkpoint.entries
        self.prefix = PREFIX if any(name.startswith(PREFIX) for name in entries) else ""
        _check_variant(self.checkpoint)
        _check_taps(self.checkpoint, self.prefix, config)
        expected = {self.prefix + name: value for name, value in expected_tensors(config).items()}
        self.faults = differences(entries, expected, ALSO)
        if check and self.faults:
            raise mismatch(self.checkpoint.directory, self.faults)

    def stored(self, path: str) -> np.dtype:
        """See `Reader`; float32 when any layer's tensor is."""
        types = {self.checkpoint.entries[self.prefix + name].dtype for _, name in _names(path, self.config)}
        return np.dtype(np.float32) if "F32" in types else np.dtype(STORED["compute"])

    def fill(self, path: str, piece: int, index: Index, out: Array) -> None:
        """See `Reader`."""
        name = self.prefix + _names(path, self.config)[piece][1]
        rows = map_rows(self.checkpoint, name, index[0].start, index[0].stop)
        out[...] = rows[(slice(None), *index[1:])]

    def blocks(self) -> list[Block]:
        """See `TensorReader`."""
        return [
            block
            for path in self.table
            for piece, (_, name) in enumerate(_names(path, self.config))
            for block in row_blocks(
                self.checkpoint, (path,), piece, self.prefix + name, layout(self.table, path).shape[0]
            )
        ]

    def wrong(self, block: Block) -> list[str]:
        """See `TensorReader`."""
        return []

    def report(self, dtype: npt.DTypeLike) -> Report:
        """See `Reader`."""
        entries = self.checkpoint.entries
        size = sum(entry.nbytes for entry in entries.values())
        memory, parameters = memory_bytes(self.table, dtype), count_weights(self.table)
        return Report(
            self.checkpoint.shards, len(entries), parameters, size, memory, notes=self.checkpoint.notes
        )


def _names(path: str, config: DFlashConfig) -> list[tuple[int | None, str]]:
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


def _check_taps(checkpoint: Checkpoint, prefix: str, config: DFlashConfig) -> None:
    entry = checkpoint.entries.get(f"{prefix}fc.weight")
    taps, width = len(config.target_layer_ids), len(config.target_layer_ids) * config.hidden_size
    if entry is not None and len(entry.shape) == 2 and entry.shape[1] != width:
        raise UserError(
            f"{checkpoint.directory}: fc.weight has {entry.shape[1]} columns, but the {taps} "
            f"target_layer_ids of config.json need {width} ({taps} x hidden_size {config.hidden_size}); "
            "give the config of this drafter"
        )


def _recognises(values: Mapping[str, Any]) -> bool:
    """Whatever calls itself a drafter; the variants that DFlash v1 is not are refused by name when it is
    read
    """
    return "dflash_config" in values or any(
        "Draft" in str(name) for name in values.get("architectures") or []
    )


def _whole(config: DFlashConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}


def _cached_numbers(config: DFlashConfig) -> int:
    """A key and a value of every layer"""
    return 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers


FORMAT = Format(
    recognises=_recognises,
    config=dflash_config,
    parameters=drafter_parameters,
    tensors=expected_tensors,
    reader=DFlashReader,
    prefix=PREFIX,
    whole=_whole,
    cached_numbers=_cached_numbers,
    note="embedding and head are the target's; fc and norms are replicated",
)
