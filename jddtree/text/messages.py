"""Check a conversation and its tools before a template sees them.

Contract: `check_messages` and `check_tools` return normally only for input that the chat templates render
without surprises; anything else raises a one-line `UserError` that names the message, the value and what to
do.
"""

from typing import Any

from jddtree.errors import UserError

MEDIA_TYPES = frozenset({"image", "image_url", "video", "video_url"})
MAX_DEPTH = 100


def check_messages(messages: Any, *, allow_media: bool = False) -> None:
    """Check a list of messages: objects with a `role` and a `content` of text or parts.

    An assistant message may leave its content out; a tool message needs a `tool_call_id`. Image and video
    parts raise unless `allow_media`: this engine runs the text model only.
    """
    if not isinstance(messages, list):
        raise UserError(f"messages is {_shown(messages)}, expected a list of objects with role and content")
    if not messages:
        raise UserError("messages is an empty list, expected at least one message; add a user message")
    for index, message in enumerate(messages):
        check_json(f"message {index}", message)
        _check_message(f"message {index}", message, allow_media)


def check_tools(tools: Any) -> None:
    """Check a list of tools; each is an object with a `type`, and functions have a `function` with a
    `name`.
    """
    if not isinstance(tools, list):
        raise UserError(f"tools is {_shown(tools)}, expected a list of objects with type and function")
    for index, tool in enumerate(tools):
        check_json(f"tool {index}", tool)
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise UserError(
                f"tool {index} is {_shown(tool)}, expected an object with a type such as 'function'"
            )
        if tool["type"] == "function":
            _check_function(f"tool {index}", tool.get("function"))


def check_json(where: str, value: Any, depth: int = 0) -> None:
    """Check that a value holds nothing but JSON types, so that every text inside it can be found, 100 levels
    deep.
    """
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: values are nested deeper than {MAX_DEPTH} levels; flatten them")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(f"{where}: key {_shown(key)} is not a text; use only JSON values")
            check_json(where, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(where, item, depth + 1)
    elif not (value is None or isinstance(value, str | int | float)):
        raise UserError(f"{where}: value {_shown(value)} is a {type(value).__name__}; use only JSON values")


def _check_message(where: str, message: Any, allow_media: bool) -> None:
    if not isinstance(message, dict):
        raise UserError(f"{where} is {_shown(message)}, expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} has role {_shown(role)}, expected a text such as 'user' or 'assistant'")
    for field in ("name", "reasoning", "reasoning_content"):
        if not isinstance(message.get(field), str | None):
            raise UserError(f"{where} has {field} {_shown(message[field])}, expected a text")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        shown = _shown(message.get("tool_call_id"))
        raise UserError(
            f"{where} has role 'tool' and tool_call_id {shown}, expected the id of the call it answers"
        )
    _check_content(where, role, message.get("content"), allow_media)
    _check_calls(where, message.get("tool_calls"))


def _check_content(where: str, role: str, content: Any, allow_media: bool) -> None:
    if isinstance(content, str) or (role == "assistant" and content is None):
        return
    if not isinstance(content, list):
        raise UserError(f"{where} has content {_shown(content)}, expected a text or a list of parts")
    if not content:
        raise UserError(
            f"{where} has content [] (an empty list), expected a text or at least one part; use a text"
        )
    for index, part in enumerate(content):
        _check_part(f"{where} part {index}", part, allow_media)


def _check_part(where: str, part: Any, allow_media: bool) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA_TYPES:
        if not allow_media:
            raise UserError(
                f"{where} has type {kind!r}, expected 'text': this engine cannot see an image or a video; "
                "remove the part or describe it in text"
            )
    elif kind != "text":
        raise UserError(f"{where} is {_shown(part)}, expected an object with type 'text'; remove the part")
    elif not isinstance(part.get("text"), str):
        raise UserError(f"{where} has text {_shown(part.get('text'))}, expected a text")


def _check_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list | None):
        raise UserError(f"{where} has tool_calls {_shown(calls)}, expected a list of calls")
    for index, call in enumerate(calls or []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str):
            raise UserError(
                f"{where} tool call {index} is {_shown(call)}, expected an object with id and function"
            )
        if not isinstance(function.get("name"), str | None):
            shown = _shown(function["name"])
            raise UserError(f"{where} tool call {index} has function name {shown}, expected a text")
        if not isinstance(function.get("arguments"), str | dict):
            shown = _shown(function.get("arguments"))
            raise UserError(f"{where} tool call {index} has arguments {shown}, expected a text or an object")


def _check_function(where: str, function: Any) -> None:
    if not isinstance(function, dict):
        raise UserError(f"{where} has function {_shown(function)}, expected an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where} has function name {_shown(name)}, expected a text such as 'get_weather'")


def _shown(value: Any) -> str:
    """The value for an error message, on one line and short."""
    try:
        text = repr(value)
    except Exception:  # Nested too deeply, or a number with too many digits.
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."
