"""The models of `bench step`: configurations alone, since their weights are random.

"kimi-k2.6" is Kimi K2.6 (its published text_config) with z-lab's DFlash drafter for it (6 Qwen3-shaped layers, block 8,
taps 1, 12, 24, 35, 47 and 58). "tiny" has the same parts at sizes that a CPU runs in seconds, and that eight ranks can
share.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from converters.synthetic import PRESETS as TARGETS
from jddtree.config import DFlashConfig, TargetConfig, dflash_config, read_json, target_config
from jddtree.errors import UserError

TINY_TARGET = {
    "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
TINY_DRAFTER = {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
K26_DRAFTER = {
    "head_dim": 128,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_scaling": TARGETS["k2.6"]["rope_scaling"],
}
TAPS = (1, 12, 24, 35, 47, 58)
MASK = {"kimi-k2.6": 163838, "tiny": 1278}


class Models(NamedTuple):
    """A target and the drafter made for it."""

    target: TargetConfig
    drafter: DFlashConfig


def models(preset: str, layers: int | None = None, experts: int | None = None) -> Models:
    """The models of a preset; layers: use only so many of the target's layers, and fewer taps where they do not fit;
    experts: use only so many routed experts a layer.

    Raises UserError for an unknown preset and for numbers of layers and experts that it does not have.
    """
    if preset not in MASK:
        raise UserError(f"--preset is {preset!r}, but must be one of {', '.join(MASK)}")
    text = dict(TARGETS["k2.6"] if preset == "kimi-k2.6" else TINY_TARGET)
    whole = text["num_hidden_layers"]
    if layers is not None and not 3 <= layers <= whole:
        raise UserError(f"--layers is {layers}, but must be 3 to the {whole} of {preset}")
    text["num_hidden_layers"] = count = layers or whole
    if experts is not None and not text["num_experts_per_tok"] <= experts <= text["n_routed_experts"]:
        most = f"{text['num_experts_per_tok']} to the {text['n_routed_experts']} of {preset}"
        raise UserError(f"--experts is {experts}, but must be {most}")
    text["n_routed_experts"] = experts or text["n_routed_experts"]
    target = _read("target", lambda values: values["text_config"].update(text), target_config)
    drafter = dict(K26_DRAFTER if preset == "kimi-k2.6" else TINY_DRAFTER)
    drafter |= {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_target_layers": count}
    drafter |= {"layer_types": ["full_attention"] * drafter["num_hidden_layers"]}
    nested = {"mask_token_id": MASK[preset], "target_layer_ids": _taps(count)}
    return Models(target, _read("drafter", lambda values: _nested(values, drafter, nested), dflash_config))


def bundled(part: str) -> Path:
    """Folder of the bundled micro "target" or "drafter"; `jddtree.loading` has it too, but needs tokenizers."""
    return Path(str(files("jddtree") / "assets" / "micro" / part))


def _taps(layers: int) -> list[int]:
    """The published taps at their place among `layers` layers"""
    return sorted({round(tap * (layers - 2) / 59) for tap in TAPS})


def _nested(values: dict[str, Any], outer: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    values.update(outer)
    values["dflash_config"].update(nested)


def _read(part: str, change, read) -> Any:
    """What `read` makes of the bundled config.json after `change`"""
    values = read_json(bundled(part) / "config.json")
    change(values)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return read(Path(folder))
