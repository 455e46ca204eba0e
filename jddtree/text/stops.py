"""Ids that end a generation.

Contract: the union of everything a model folder says and of the ends that K2 models are known to write. K2.6
ends its turns with `<|im_end|>` although its tokenizer names `[EOS]`; an engine that watches only the latter
never stops.
"""

from pathlib import Path
from typing import Any

from jddtree.errors import UserError
from jddtree.text.token_files import read_json
from jddtree.text.tokenizer import Tokenizer

KNOWN_ENDS = ("<|im_end|>", "[EOS]", "[EOT]")


def stop_ids(directory: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ascending stop ids of a model folder.

    Taken from config.json (`eos_token_id`, also inside `text_config`), generation_config.json (one id or a
    list; the file may be absent), `eos_token` of tokenizer_config.json, and `<|im_end|>`, `[EOS]`, `[EOT]`
    where the vocabulary has them.

    Raises UserError when a file cannot be read or names an end that is not in the vocabulary.
    """
    folder = Path(directory)
    config, tokenizer_config = folder / "config.json", folder / "tokenizer_config.json"
    found = _configured(config, read_json(config), tokenizer)
    generation_config = folder / "generation_config.json"
    if generation_config.exists():
        found |= _eos_ids(generation_config, read_json(generation_config).get("eos_token_id"), tokenizer)
    found |= _eos_token(tokenizer_config, read_json(tokenizer_config).get("eos_token"), tokenizer)
    found |= {tokenizer.special_tokens[name] for name in KNOWN_ENDS if name in tokenizer.special_tokens}
    return tuple(sorted(found))


def _configured(path: Path, config: dict[str, Any], tokenizer: Tokenizer) -> set[int]:
    inner = config.get("text_config")
    found = _eos_ids(path, config.get("eos_token_id"), tokenizer)
    return found | _eos_ids(path, inner.get("eos_token_id"), tokenizer) if isinstance(inner, dict) else found


def _eos_ids(path: Path, value: Any, tokenizer: Tokenizer) -> set[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for identifier in values:
        if type(identifier) is not int or not 0 <= identifier < tokenizer.vocab_size:
            raise UserError(
                f"{path}: eos_token_id {identifier!r} is not an id in 0..{tokenizer.vocab_size - 1}; "
                "use the configuration files of one model"
            )
    return set(values)


def _eos_token(path: Path, value: Any, tokenizer: Tokenizer) -> set[int]:
    name = value.get("content") if isinstance(value, dict) else value
    if name is None:
        return set()
    if not isinstance(name, str) or name not in tokenizer.special_tokens:
        raise UserError(
            f"{path}: eos_token {name!r} is not a special token; use the configuration files of one model"
        )
    return {tokenizer.special_tokens[name]}
