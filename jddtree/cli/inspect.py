"""`inspect`: what a checkpoint folder holds and what it costs in memory, from its small files alone.

config.json is enough; with `model.safetensors.index.json` the tensor names are compared too. No shard is opened unless
a folder has shards named model* and no index, so the published 595 GB model is answered for from two small files.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from converters import kimi
from converters.checkpoint import Checkpoint, read_index
from converters.drafters import format_of, is_drafter, read_config
from jddtree.config import DrafterConfig, TargetConfig, read_json, target_config
from jddtree.models.parameters import Parameter, target_parameters

RANKS = (1, 2, 4, 8)
ITEM_BYTES = {"compute": 2, "float32": 4, "int32": 4, "BF16": 2, "F32": 4, "I32": 4}  # compute: bfloat16
CACHE_ITEM_BYTES = 2
LISTED = 5
GIB = 1 << 30
VISION_FIELDS = (
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "vt_hidden_size",
    "vt_intermediate_size",
    "vt_num_hidden_layers",
    "mm_hidden_size",
    "text_hidden_size",
)
REPLICATED_NOTE = "q_a, kv_a, norms and routers are replicated"
COMPONENTS = {  # part of a tensor name: component; the first that fits
    "weight_packed": "experts_packed",
    "weight_scale": "experts_scales",
    "weight_shape": "experts_shapes",
    "self_attn": "attention",
    "shared_experts": "shared_experts",
    "mlp.gate.": "routers",
    "mlp.": "dense",
    "embed_tokens": "embed",
    "lm_head": "head",
    "fc.weight": "taps",
    "norm": "norms",
}


def inspect(directory: Path) -> dict[str, Any]:
    """Everything `run` prints, as one JSON-ready dict. Bytes and counts are integers.

    Raises UserError when config.json is missing or describes no model that this project runs.
    """
    directory = Path(directory)
    outer = read_json(directory / "config.json")
    if is_drafter(outer):
        return _inspect_drafter(directory, read_config(directory))
    return _inspect_target(directory, target_config(directory), outer.get("vision_config"))


def run(directory: Path, json_output: bool) -> None:
    """Print the answer for one folder: a table, or exactly one JSON object."""
    answer = inspect(directory)
    print(json.dumps(answer) if json_output else render(answer))


def _inspect_target(directory: Path, config: TargetConfig, vision_config: Any) -> dict[str, Any]:
    expected = kimi.expected_tensors(config)
    total = kimi.count_parameters(config)
    experts = 3 * config.hidden_size * config.moe_intermediate_size * config.num_moe_layers
    idle = experts * (config.n_routed_experts - config.num_experts_per_tok)
    vision = _vision(vision_config)
    answer = _common(directory, "target", config, expected)
    answer["parameters"] = {
        "total": total,
        "active_per_token": total - idle - config.vocab_size * config.hidden_size,  # the embedding is a look-up
        "vision": None if vision is None else vision["parameters"],
    }
    answer["bytes"]["vision"] = None if vision is None else vision["bytes"]
    answer["tensors"] |= {"expected_vision": None if vision is None else vision["tensors"]}
    answer["tensors"] |= _found(directory, expected, kimi.PREFIX, kimi.VISION_PREFIXES)
    table = target_parameters(config)
    answer["memory"] = {
        "weights_per_device": _per_device(table, {"num_attention_heads": config.num_attention_heads}),
        "cache_bytes_per_token": config.latent_size * config.num_hidden_layers * CACHE_ITEM_BYTES,
        "note": REPLICATED_NOTE,
    }
    return answer


def _inspect_drafter(directory: Path, config: DrafterConfig) -> dict[str, Any]:
    form = format_of(config)
    expected, table = form.tensors(config), form.parameters(config)
    answer = _common(directory, "drafter", config, expected)
    answer["parameters"] = {"total": sum(math.prod(parameter.shape) for parameter in table.values())}
    answer["tensors"] |= _found(directory, expected, form.prefix, ())
    answer["memory"] = {
        "weights_per_device": _per_device(table, form.whole(config)),
        "cache_bytes_per_token": form.cached_numbers(config) * CACHE_ITEM_BYTES,
        "note": form.note,
    }
    return answer


def _common(directory: Path, kind: str, config: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for name, (dtype, shape) in expected.items():
        component = next(component for part, component in COMPONENTS.items() if part in name)
        sizes[component] += math.prod(shape) * ITEM_BYTES[dtype]
    components = {component: sizes[component] for component in dict.fromkeys(COMPONENTS.values()) if sizes[component]}
    return {
        "kind": kind,
        "directory": str(directory),
        "config": asdict(config),
        "parameters": {},
        "bytes": components | {"total": sum(components.values())},
        "tensors": {"expected": len(expected)},
    }


def _found(directory: Path, expected: Mapping[str, Any], prefix: str, ignored: tuple[str, ...]) -> dict[str, Any]:
    """How the names in the folder compare with the expected ones; found is None where there are none to compare."""
    index = read_index(directory)
    if index is not None:
        names: Iterable[str] = index.weight_map
        shards = sorted(set(index.weight_map.values()))
    elif any(directory.glob("model*.safetensors")):
        checkpoint = Checkpoint(directory)
        names, shards = checkpoint.entries, list(checkpoint.shards)
    else:
        return {"found": None, "index_bytes": None}
    others = [name for name in names if name.startswith(ignored)]
    own = {name.removeprefix(prefix) for name in names} - set(others)
    missing, unexpected = [name for name in expected if name not in own], sorted(own - expected.keys())
    return {
        "found": len(own),
        **({"found_vision": len(others)} if ignored else {}),
        "missing": len(missing),
        "missing_first": missing[:LISTED],
        "unexpected": len(unexpected),
        "unexpected_first": unexpected[:LISTED],
        "index_bytes": None if index is None else index.total_size,
        "shards": len(shards),
        "shards_present": sum((directory / shard).is_file() for shard in shards),
    }


def _per_device(table: Mapping[str, Parameter], heads: Mapping[str, int]) -> list[dict[str, Any]]:
    """Weight bytes of one device for each number of ranks; None, with the reason, where something cannot be split.

    heads: counts that a rank gets whole, by field name.
    """
    answers: list[dict[str, Any]] = []
    for ranks in RANKS:
        size, parts = 0, dict(heads)
        for path, parameter in table.items():
            whole = math.prod(parameter.shape) * ITEM_BYTES[parameter.dtype]
            size += whole if parameter.split is None else whole // ranks
            if parameter.split is not None:
                parts[path] = parameter.shape[parameter.split]
        uneven = (f"{name} {count} is not divisible by {ranks}" for name, count in parts.items() if count % ranks)
        reason = next(uneven, None)
        answers.append({"ranks": ranks, "bytes": None if reason else size, "reason": reason})
    return answers


def _vision(config: Any) -> dict[str, int] | None:
    """Tensors, parameters and bytes of vision tower and projector (bfloat16), None where the config does not tell."""
    if not isinstance(config, dict) or not all(type(config.get(name)) is int for name in VISION_FIELDS):
        return None
    merge = config.get("merge_kernel_size")
    if not isinstance(merge, list) or not all(type(size) is int for size in merge):
        return None
    patch, height, width, hidden, inner, layers, projected, text = (config[name] for name in VISION_FIELDS)
    merged = projected * math.prod(merge)
    norm = 2 * hidden
    block = 2 * norm + _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block += _linear(hidden, inner) + _linear(inner, hidden)
    tower = _linear(3 * patch * patch, hidden) + height * width * hidden + layers * block + norm
    projector = 2 * projected + _linear(merged, merged) + _linear(merged, text)
    parameters = tower + projector
    return {"tensors": 3 + 12 * layers + 2 + 6, "parameters": parameters, "bytes": parameters * ITEM_BYTES["BF16"]}


def _linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with a bias."""
    return inputs * outputs + outputs


def render(answer: Mapping[str, Any]) -> str:
    """The answer of `inspect` as text for a terminal."""
    lines = [f"{answer['directory']}: {answer['kind']}", "", *_render_config(answer["config"]), "", "parameters"]
    for name, count in answer["parameters"].items():
        lines.append(_row(name, "unknown" if count is None else f"{count:>20,}"))
    lines += ["", "bytes in the files"]
    for name, size in answer["bytes"].items():
        lines.append(_row(name, "unknown" if size is None else f"{size:>20,}  {size / GIB:10.4f} GiB"))
    lines += ["", "tensors", *_render_tensors(answer["tensors"]), "", "memory of one device (weights in bfloat16)"]
    for entry in answer["memory"]["weights_per_device"]:
        size = entry["bytes"]
        text = f"not possible: {entry['reason']}" if size is None else f"{size:>20,}  {size / GIB:10.4f} GiB"
        lines.append(_row(f"{entry['ranks']} rank{'' if entry['ranks'] == 1 else 's'}", text))
    if (size := answer["memory"].get("cache_bytes_per_token")) is not None:
        lines.append(_row("cache_bytes_per_token", f"{size:>20,}"))
    return "\n".join([*lines, f"  {answer['memory']['note']}"])


def _render_config(config: Mapping[str, Any]) -> list[str]:
    flat = {name: value for name, value in config.items() if not isinstance(value, dict)}
    flat |= {f"rope.{name}": value for name, value in config["rope"].items()}
    return ["config", *(_row(name, ", ".join(map(str, v)) if isinstance(v, tuple) else v) for name, v in flat.items())]


def _render_tensors(tensors: Mapping[str, Any]) -> list[str]:
    if tensors["found"] is None:
        rows = {name: value for name, value in tensors.items() if name.startswith("expected")}
        return [*(_row(name, value) for name, value in rows.items()), _row("found", "no index and no shard to compare")]
    return [
        _row(name, ", ".join(v) if isinstance(v, list) else v) for name, v in tensors.items() if v not in (None, [])
    ]


def _row(name: str, value: Any) -> str:
    return f"  {name:<24} {value}"
