"""What a user asks, as token ids: a string, a list of chat messages, or a list of token ids used as they
are.
"""

from collections.abc import Sequence
from typing import Any

from jddtree.loading import Model
from jddtree.text.messages import check_messages

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


def prompt_ids(
    model: Model,
    prompt: Prompt,
    *,
    raw: bool = False,
    system_prompt: str | None = None,
    thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a prompt. Text from users never becomes a control token.

    raw: take a string as it is, without the chat template. thinking: None is the model's default.
    Raises UserError for a prompt of another kind and for messages that the template cannot render.
    """
    thinking = model.defaults.thinking if thinking is None else thinking
    if isinstance(prompt, str) and raw:
        return [*model.defaults.raw_prefix, *model.tokenizer.encode(prompt)]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list | tuple) and all(type(item) is int for item in prompt):
        return list(prompt)
    messages: Any = prompt
    if system_prompt is not None:
        check_messages(prompt)
        messages = [{"role": "system", "content": system_prompt}, *prompt]
    return model.chat.encode(model.tokenizer, messages, thinking=thinking, tools=tools)
