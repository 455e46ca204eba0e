"""Kimi K2.6: Hugging Face tensors to the target's arrays.

Layers are read one after the other, in the order of the files, into stacked arrays that are allocated once, so that
host memory stays near the size of the result. What changes on the way (`jddtree.models.parameters` says why):
* rotary rows of q_b and kv_a go from interleaved pairs to half-split order;
* kv_b splits, inside each head, into k_up (first rows) and v_up;
* the router becomes float32; packed experts go to tile order (`converters.packing`) and stay INT4.
Tensor names, shapes and types: the published K2.6 index; a projection is packed when it has `.weight_packed`.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from converters.checkpoint import Array, Checkpoint, Entry, Progress, Report, differences, mismatch, phrase
from converters.packing import pack_down, pack_gate_up
from jddtree.config import GROUP_SIZE, TargetConfig
from jddtree.models.parameters import Parameter, target_parameters

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PACKED = ("weight_packed", "weight_scale", "weight_shape")
GLOBAL_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
ATTENTION_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
    "o": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
}
DENSE_NAMES = {
    "mlp_gate": "mlp.gate_proj.weight",
    "mlp_up": "mlp.up_proj.weight",
    "mlp_down": "mlp.down_proj.weight",
}
MOE_NAMES = {
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
ALSO = {"weight_shape": "I64"}  # newer compressed-tensors writes it so; the values are checked


def expected_tensors(config: TargetConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every text tensor of a checkpoint without prefix: name to (safetensors dtype, shape)."""
    table = target_parameters(config)
    expected = {tensor: ("BF16", table[path].shape) for path, tensor in GLOBAL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        start = f"model.layers.{layer}."
        kind, names = _layer_names(config, layer)
        for name, tensor in names.items():
            shape = _kv_b_shape(config) if name == "kv_b" else table[f"{kind}.{name}"].shape[1:]
            expected[start + tensor] = ("F32" if name == "router_bias" else "BF16", shape)
        if kind == "moe":
            expected |= _expert_tensors(config, start)
    return expected


def load_target(
    directory: Path, config: TargetConfig, dtype: npt.DTypeLike, *, progress: Progress | None = None
) -> tuple[dict[str, Array], Report]:
    """Read a checkpoint folder into the arrays of `target_parameters(config)`, by dotted path.

    dtype: of the "compute" arrays, ml_dtypes.bfloat16 or numpy.float32.
    progress: called with (bytes done, bytes in all) of the tensors that are read.
    Raises UserError for a broken folder (`Checkpoint`), one that lists all tensors that are missing, unexpected, of the
    wrong shape or type, unpacked experts and packed other weights, and one for a `weight_shape` that contradicts them.
    """
    checkpoint = Checkpoint(directory)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in checkpoint.entries) else ""
    vision = {name: entry for name, entry in checkpoint.entries.items() if name.startswith(VISION_PREFIXES)}
    text = {name: entry for name, entry in checkpoint.entries.items() if name not in vision}
    _check(checkpoint.directory, text, {prefix + name: value for name, value in expected_tensors(config).items()})
    table = target_parameters(config)
    arrays: dict[str, Array] = {path: np.empty(entry.shape, _dtype(entry, dtype)) for path, entry in table.items()}
    total = sum(entry.nbytes for entry in text.values())
    _Loader(checkpoint, config, prefix, arrays, total, progress).load()
    report = Report(
        files=tuple(sorted({entry.shard for entry in text.values()})),
        tensors=len(text),
        parameters=count_parameters(config),
        file_bytes=total,
        memory_bytes=sum(array.nbytes for array in arrays.values()),
        skipped_tensors=len(vision),
        skipped_bytes=sum(entry.nbytes for entry in vision.values()),
        notes=checkpoint.notes,
    )
    return arrays, report


def count_parameters(config: TargetConfig) -> int:
    """Weights of the text model; an INT4 weight counts as one, scales and shapes as none."""
    sizes = ((name, math.prod(shape)) for name, (_, shape) in expected_tensors(config).items())
    return sum(
        size * (8 if name.endswith("weight_packed") else 1)
        for name, size in sizes
        if not name.endswith(("weight_scale", "weight_shape"))
    )


class _Loader:
    """Moves the tensors of one checked checkpoint into allocated arrays."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: TargetConfig,
        prefix: str,
        arrays: dict[str, Array],
        total: int,
        progress: Progress | None,
    ):
        self.checkpoint, self.config, self.prefix, self.arrays = checkpoint, config, prefix, arrays
        self.total, self.done, self.progress = total, 0, progress

    def load(self) -> None:
        """Read everything, layers in the order in which the files begin them."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for layer in self._order():
                if layer is None:
                    self._load_globals()
                else:
                    self._load_layer(layer, pool)

    def _order(self) -> list[int | None]:
        first: dict[int | None, tuple[int, int]] = {}
        for name in self.checkpoint.entries:
            found = re.match(r"model\.(?:layers\.(\d+)\.|[en])|lm_head", name.removeprefix(self.prefix))
            if found:
                layer = int(found[1]) if found[1] else None
                position = self.checkpoint.position(name)
                first[layer] = min(first.get(layer, position), position)
        return sorted(first, key=first.__getitem__)

    def _load_globals(self) -> None:
        for path, name in GLOBAL_NAMES.items():
            self.arrays[path][...] = self._read(name)
            self._advance()

    def _load_layer(self, layer: int, pool: ThreadPoolExecutor) -> None:
        config, start = self.config, f"model.layers.{layer}."
        kind, names = _layer_names(config, layer)
        row = layer if kind == "dense" else layer - config.first_k_dense_replace
        for name, tensor in names.items():
            value = self._read(start + tensor)
            if name == "kv_b":
                heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
                self.arrays[f"{kind}.k_up"][row] = heads[:, : config.qk_nope_head_dim]
                self.arrays[f"{kind}.v_up"][row] = heads[:, config.qk_nope_head_dim :]
            elif name in ("q_b", "kv_a"):
                blocks = config.num_attention_heads if name == "q_b" else 1
                _half_split(value, self.arrays[f"{kind}.{name}"][row], blocks, config.qk_rope_head_dim)
            else:
                self.arrays[f"{kind}.{name}"][row] = value
        self._advance()
        if kind == "moe":
            self._load_experts(start, row * config.n_routed_experts, pool)

    def _load_experts(self, start: str, first: int, pool: ThreadPoolExecutor) -> None:
        """The experts of one layer, several at a time; `first` is the place of expert 0 in the stacked arrays."""
        wrong, pending = [], []
        for expert in range(self.config.n_routed_experts):
            names = {projection: f"{start}mlp.experts.{expert}.{projection}." for projection in PROJECTIONS}
            wrong += [text for name in names.values() for text in self._wrong_shape(name)]
            words_scales = [self._read(names[p] + part)[None] for p in PROJECTIONS for part in PACKED[:2]]
            pending.append(pool.submit(self._pack, first + expert, words_scales))
        for future in pending:
            future.result()
            self._advance()
        if wrong:
            raise mismatch(self.checkpoint.directory, [phrase("whose value contradicts the packed weights", wrong)])

    def _pack(self, place: int, words_scales: list[Array]) -> None:
        """words_scales: gate words, gate scale, up words, up scale, down words, down scale, each with a leading 1."""
        one = slice(place, place + 1)
        gate_up = (self.arrays["experts.gate_up"][one], self.arrays["experts.gate_up_scale"][one])
        down = (self.arrays["experts.down"][one], self.arrays["experts.down_scale"][one])
        gate_words, gate_scale, up_words, up_scale, down_words, down_scale = words_scales
        pack_gate_up(gate_words, gate_scale, up_words, up_scale, out=gate_up)
        pack_down(down_words, down_scale, out=down)

    def _wrong_shape(self, name: str) -> Iterator[str]:
        rows, words = self.checkpoint.entries[f"{self.prefix}{name}weight_packed"].shape
        found = self._read(name + "weight_shape").tolist()
        if found != [rows, words * 8]:
            yield f"{self.prefix}{name}weight_shape is {found}, wanted {[rows, words * 8]}"

    def _read(self, name: str) -> Array:
        self.done += self.checkpoint.entries[self.prefix + name].nbytes
        return self.checkpoint.read(self.prefix + name)

    def _advance(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total)


def _layer_names(config: TargetConfig, layer: int) -> tuple[str, dict[str, str]]:
    """("dense" or "moe", path in the layer to tensor name in the layer); experts are not among them."""
    if layer < config.first_k_dense_replace:
        return "dense", ATTENTION_NAMES | DENSE_NAMES
    return "moe", ATTENTION_NAMES | MOE_NAMES


def _kv_b_shape(config: TargetConfig) -> tuple[int, int]:
    return config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank


def _expert_tensors(config: TargetConfig, start: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for expert in range(config.n_routed_experts):
        for projection in PROJECTIONS:
            rows, columns = (hidden, width) if projection == "down_proj" else (width, hidden)
            name = f"{start}mlp.experts.{expert}.{projection}."
            tensors[name + "weight_packed"] = ("I32", (rows, columns // 8))
            tensors[name + "weight_scale"] = ("BF16", (rows, columns // GROUP_SIZE))
            tensors[name + "weight_shape"] = ("I32", (2,))
    return tensors


def _check(directory: Path, text: Mapping[str, Entry], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """One UserError for every difference; a weight that is packed or not, against expectation, is named as that."""
    unpacked = [name for name in text if name not in expected and name + "_packed" in expected]
    packed = [name for name in text if name.endswith(".weight_packed") and name.removesuffix("_packed") in expected]
    phrases = []
    if unpacked:
        phrases.append(phrase("of routed experts not packed (INT4 needs .weight_packed, found .weight)", unpacked))
    if packed:
        phrases.append(phrase("packed, though only routed experts may be (needs .weight in bfloat16)", packed))
    bases = {name.rpartition(".")[0] for name in (*unpacked, *packed)}
    parts = {f"{base}.{part}" for base in bases for part in ("weight", *PACKED)}
    phrases += differences(
        {name: entry for name, entry in text.items() if name not in parts},
        {name: value for name, value in expected.items() if name not in parts},
        ALSO,
    )
    if phrases:
        raise mismatch(directory, phrases)


def _half_split(rows: Array, out: Array, blocks: int, rope: int) -> None:
    """Copy [blocks * size, columns]; the last `rope` rows of a block go from interleaved pairs to evens, then odds."""
    source, target = (array.reshape(blocks, -1, array.shape[-1]) for array in (rows, out))
    keep, half = source.shape[1] - rope, rope // 2
    target[:, :keep] = source[:, :keep]
    target[:, keep : keep + half] = source[:, keep::2]
    target[:, keep + half :] = source[:, keep + 1 :: 2]


def _dtype(parameter: Parameter, compute: npt.DTypeLike) -> npt.DTypeLike:
    return compute if parameter.dtype == "compute" else parameter.dtype
