"""Kimi K2.6: Hugging Face tensors to the target's arrays.

`KimiReader` gives any slice of any array straight from the files; `load_target` fills whole arrays in host
memory with it. What changes on the way (`jddtree.models.parameters` says why):
* rotary rows of q_b and kv_a go from interleaved pairs to half-split order;
* kv_b splits, inside each head, into k_up (first rows) and v_up;
* packed experts go to tile order (`converters.packing`) and stay INT4.
Tensor names, shapes and types: the published K2.6 index; a projection is packed when it has `.weight_packed`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from converters.checkpoint import Array, Checkpoint, Entry, Progress, Report, differences, mismatch, phrase
from converters.packing import pack_down_scales, pack_down_words, pack_gate_up_scales, pack_gate_up_words
from converters.pieces import (
    EXPERTS,
    STORED,
    Block,
    Index,
    count_weights,
    layout,
    map_rows,
    memory_bytes,
    read_all,
    row_blocks,
    source_of,
)
from jddtree.config import GROUP_SIZE, TargetConfig
from jddtree.models.parameters import target_parameters

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
EXPERT_PATHS = ("experts.gate_up", "experts.gate_up_scale", "experts.down", "experts.down_scale")
PACKERS: Mapping[str, Callable[..., None]] = {
    "gate_up": pack_gate_up_words,
    "gate_up_scale": pack_gate_up_scales,
    "down": pack_down_words,
    "down_scale": pack_down_scales,
}
TILE_ROWS = 32
ALSO = {"weight_shape": "I64"}  # newer compressed-tensors writes it so; the values are checked


def expected_tensors(config: TargetConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every text tensor of a checkpoint without prefix: name to (safetensors dtype, shape)."""
    table = target_parameters(config)
    expected = {tensor: ("BF16", table[path].shape) for path, tensor in GLOBAL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        start = f"model.layers.{layer}."
        kind = "dense" if layer < config.first_k_dense_replace else "moe"
        for name, tensor in _names(kind).items():
            shape = _kv_b_shape(config) if name == "kv_b" else table[f"{kind}.{name}"].shape[1:]
            expected[start + tensor] = ("F32" if name == "router_bias" else "BF16", shape)
        if kind == "moe":
            expected |= _expert_tensors(config, start)
    return expected


def load_target(
    directory: Path, config: TargetConfig, dtype: npt.DTypeLike, *, progress: Progress | None = None
) -> tuple[dict[str, Array], Report]:
    """Read a checkpoint folder into the arrays of `target_parameters(config)`, by dotted path.

    dtype: of the "compute" arrays, ml_dtypes.bfloat16 or numpy.float32. progress: called with (bytes done,
    bytes in all) of the tensors that are read. Raises UserError for a broken folder (`Checkpoint`), one that
    lists all tensors that are missing, unexpected, of the wrong shape or type, unpacked experts and packed
    other weights, and one for a `weight_shape` that contradicts them.
    """
    reader = KimiReader(directory, config)
    return read_all(reader, dtype, progress=progress), reader.report(dtype)


def count_parameters(config: TargetConfig) -> int:
    """Weights of the text model; an INT4 weight counts as one, scales and shapes as none."""
    return count_weights(target_parameters(config))


class KimiReader:
    """Slices of the target's arrays from a checkpoint folder; a `TensorReader`.

    faults: the differences between the folder's tensors and those that the configuration needs, as phrases.
    Raises UserError for a broken folder (`Checkpoint`) and, unless `check` is False, one with all faults.
    """

    def __init__(self, directory: Path, config: TargetConfig, *, check: bool = True):
        self.checkpoint, self.config, self.table = Checkpoint(directory), config, target_parameters(config)
        entries = self.checkpoint.entries
        self.prefix = PREFIX if any(name.startswith(PREFIX) for name in entries) else ""
        self.skipped = {name: entry for name, entry in entries.items() if name.startswith(VISION_PREFIXES)}
        self.used = {name: entry for name, entry in entries.items() if name not in self.skipped}
        expected = {self.prefix + name: value for name, value in expected_tensors(config).items()}
        self.faults = _faults(self.used, expected)
        if check and self.faults:
            raise mismatch(self.checkpoint.directory, self.faults)

    def stored(self, path: str) -> np.dtype:
        """See `Reader`."""
        return np.dtype(STORED[self.table[path].dtype])

    def fill(self, path: str, piece: int, index: Index, out: Array) -> None:
        """See `Reader`."""
        if path in GLOBAL_NAMES:
            out[...] = self._rows(GLOBAL_NAMES[path], index[0])[(slice(None), *index[1:])]
            return
        kind, name = path.split(".")
        start = f"model.layers.{self._layer(kind, piece)}."
        if path.startswith(EXPERTS):
            for place, expert in enumerate(range(index[0].start, index[0].stop)):
                self._fill_expert(name, f"{start}mlp.experts.{expert}.", index[1:], out[place : place + 1])
        elif name in ("k_up", "v_up"):
            out[...] = self._head_rows(start, name, index[0])[(slice(None), *index[1:])]
        elif name in ("q_b", "kv_a"):
            blocks = self.config.num_attention_heads if name == "q_b" else 1
            rows = self._half_split(start + ATTENTION_NAMES[name], index[0], blocks)
            out[...] = rows[(slice(None), *index[1:])]
        else:
            out[...] = self._rows(start + _names(kind)[name], index[0])[(slice(None), *index[1:])]

    def blocks(self) -> list[Block]:
        """See `TensorReader`."""
        found = [
            block
            for path, tensor in GLOBAL_NAMES.items()
            for block in row_blocks(
                self.checkpoint, (path,), 0, self.prefix + tensor, self.table[path].shape[0]
            )
        ]
        for kind, layers in (
            ("dense", self.config.first_k_dense_replace),
            ("moe", self.config.num_moe_layers),
        ):
            for piece in range(layers):
                found += self._layer_blocks(kind, piece)
        return found

    def wrong(self, block: Block) -> list[str]:
        """See `TensorReader`: values of `weight_shape`."""
        if not block.paths[0].startswith(EXPERTS):
            return []
        start = f"{self.prefix}model.layers.{self._layer('moe', block.piece)}.mlp.experts."
        names = (
            f"{start}{expert}.{name}." for expert in range(block.start, block.stop) for name in PROJECTIONS
        )
        return [text for name in names for text in self._wrong_shape(name)]

    def report(self, dtype: npt.DTypeLike) -> Report:
        """See `Reader`."""
        return Report(
            files=tuple(sorted({entry.shard for entry in self.used.values()})),
            tensors=len(self.used),
            parameters=count_weights(self.table),
            file_bytes=sum(entry.nbytes for entry in self.used.values()),
            memory_bytes=memory_bytes(self.table, dtype),
            skipped_tensors=len(self.skipped),
            skipped_bytes=sum(entry.nbytes for entry in self.skipped.values()),
            notes=self.checkpoint.notes,
        )

    def _layer(self, kind: str, piece: int) -> int:
        return piece if kind == "dense" else piece + self.config.first_k_dense_replace

    def _layer_blocks(self, kind: str, piece: int) -> Iterator[Block]:
        start = f"{self.prefix}model.layers.{self._layer(kind, piece)}."
        for name, tensor in _names(kind).items():
            paths = (f"{kind}.k_up", f"{kind}.v_up") if name == "kv_b" else (f"{kind}.{name}",)
            rows = layout(self.table, paths[0]).shape[0]
            yield from row_blocks(self.checkpoint, paths, piece, start + tensor, rows)
        for expert in range(self.config.n_routed_experts if kind == "moe" else 0):
            names = (f"{start}mlp.experts.{expert}.{name}.{part}" for name in PROJECTIONS for part in PACKED)
            sources = tuple(source_of(self.checkpoint, name) for name in names)
            yield Block(EXPERT_PATHS, piece, expert, expert + 1, sources)

    def _fill_expert(self, name: str, start: str, index: Index, out: Array) -> None:
        """index: slices of row tiles, column tiles and the last axis, which is never cut."""
        part, groups = (1, 1) if name.endswith("scale") else (0, 4)
        rows = slice(index[0].start * TILE_ROWS, index[0].stop * TILE_ROWS)
        width = groups * (2 if name == "down_scale" else 1)
        columns = slice(index[1].start * width, index[1].stop * width)
        projections = PROJECTIONS[2:] if name.startswith("down") else PROJECTIONS[:2]
        tensors = [self._rows(f"{start}{p}.{PACKED[part]}", rows)[None, :, columns] for p in projections]
        PACKERS[name](*tensors, out)

    def _head_rows(self, start: str, name: str, heads: slice) -> Array:
        """k_up or v_up of some heads: [heads, rows of a head, latent]."""
        config = self.config
        size, nope = config.qk_nope_head_dim + config.v_head_dim, config.qk_nope_head_dim
        rows = self._rows(start + ATTENTION_NAMES["kv_b"], slice(heads.start * size, heads.stop * size))
        both = rows.reshape(-1, size, config.kv_lora_rank)
        return both[:, :nope] if name == "k_up" else both[:, nope:]

    def _half_split(self, tensor: str, rows: slice, blocks: int) -> Array:
        """Some rows of a tensor of `blocks` equal blocks; the last rows of a block are its rotary ones."""
        size = self.checkpoint.entries[self.prefix + tensor].shape[0] // blocks
        first, last = rows.start // size * size, -(-rows.stop // size) * size
        places = np.arange(rows.start - first, rows.stop - first)
        order = half_split_order(size, self.config.qk_rope_head_dim)
        return self._rows(tensor, slice(first, last))[places // size * size + order[places % size]]

    def _rows(self, tensor: str, rows: slice) -> Array:
        return map_rows(self.checkpoint, self.prefix + tensor, rows.start, rows.stop)

    def _wrong_shape(self, name: str) -> Iterator[str]:
        rows, words = self.checkpoint.entries[f"{name}weight_packed"].shape
        found = map_rows(self.checkpoint, f"{name}weight_shape").tolist()
        if found != [rows, words * 8]:
            yield f"{name}weight_shape is {found}, wanted {[rows, words * 8]}"


def half_split_order(size: int, rope: int) -> npt.NDArray[np.int64]:
    """Rows of a block of `size` in our order: the last `rope` ones are evens, then odds, instead of pairs."""
    keep = size - rope
    return np.concatenate([np.arange(keep), np.arange(keep, size, 2), np.arange(keep + 1, size, 2)])


def _names(kind: str) -> dict[str, str]:
    """Path in a "dense" or "moe" layer to tensor name in the layer; experts are not among them."""
    return ATTENTION_NAMES | (DENSE_NAMES if kind == "dense" else MOE_NAMES)


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


def _faults(text: Mapping[str, Entry], expected: dict[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Every difference; a weight that is packed or not, against expectation, is named as that."""
    unpacked = [name for name in text if name not in expected and name + "_packed" in expected]
    packed = [
        name for name in text if name.endswith(".weight_packed") and name.removesuffix("_packed") in expected
    ]
    phrases = []
    if unpacked:
        phrases.append(
            phrase("of routed experts not packed (INT4 needs .weight_packed, found .weight)", unpacked)
        )
    if packed:
        phrases.append(
            phrase("packed, though only routed experts may be (needs .weight in bfloat16)", packed)
        )
    bases = {name.rpartition(".")[0] for name in (*unpacked, *packed)}
    parts = {f"{base}.{part}" for base in bases for part in ("weight", *PACKED)}
    phrases += differences(
        {name: entry for name, entry in text.items() if name not in parts},
        {name: value for name, value in expected.items() if name not in parts},
        ALSO,
    )
    return phrases
