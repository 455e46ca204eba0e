"""Conversations to prompts, by the chat template of the model folder.

Contract: `render` gives the template's text and `encode` its ids. By default no text from a message or a tool (content,
names, roles, ids, schemas) becomes a control token: what such a text contains stays ordinary text, and all other ids
equal those of the published tokenizer, which parses the whole rendered text and so lets messages forge control tokens
(shared/facts/kimi_k26.md sections 4.1 and 4.2). `trust_content=True` repeats the published behaviour.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jddtree.errors import UserError
from jddtree.text.guard import MarkerGuard, texts_in
from jddtree.text.messages import MEDIA_TYPES, check_messages, check_tools
from jddtree.text.tokenizer import Tokenizer
from jddtree.text.tools import NotExpressible, sorted_by_key, tools_to_typescript
from jddtree.text.vocabulary import read_json

Message = dict[str, Any]
ToolStyle = Literal["json", "typescript"]

# Roles and part types that templates compare with; they hold no text of a user.
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_PART_TYPES = MEDIA_TYPES | {"text"}


class ChatTemplate:
    """One compiled chat template; immutable, usable from several threads."""

    def __init__(self, source: str, name: str = "chat template"):
        """Compile a Jinja template; `name` is where it came from. Raises UserError for a syntax error."""
        self._name = name
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name} line {error.lineno}: {error.message}; download the template again") from error

    @classmethod
    def from_directory(cls, path: str | Path) -> "ChatTemplate":
        """The template in `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`.

        Raises UserError when the folder has neither, or the template does not compile.
        """
        file = Path(path) / "chat_template.jinja"
        if file.exists():
            try:
                return cls(file.read_text(encoding="utf-8"), str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{file} cannot be read ({error}); check the file and its permissions") from error
        config = Path(path) / "tokenizer_config.json"
        source = read_json(config).get("chat_template")
        if not isinstance(source, str):
            raise UserError(
                f"{file} does not exist and {config} has chat_template {str(source)[:40]!r}, expected a template; "
                "copy chat_template.jinja of the model into the folder"
            )
        return cls(source, f"chat_template in {config}")

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = True,
        add_generation_prompt: bool = True,
        preserve_thinking: bool = False,
        tool_style: ToolStyle = "typescript",
        allow_media: bool = False,
    ) -> str:
        """Prompt text of a conversation.

        `thinking=False` opens the answer with empty reasoning (instant mode); `preserve_thinking` keeps the reasoning
        of past turns; `tool_style` declares tools as TypeScript (as the published tokenizer does; tools that have no
        such form are declared as JSON, sorted by key) or as JSON in the given order. `allow_media` renders placeholders
        for images, which this engine cannot see. The options are those of K2.6 (facts 4.2).

        Raises UserError for bad messages or tools, and when the template refuses them.
        """
        variables = self._variables(messages, tools, tool_style, allow_media)
        return self._render(variables, thinking, add_generation_prompt, preserve_thinking)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: list[Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = True,
        add_generation_prompt: bool = True,
        preserve_thinking: bool = False,
        tool_style: ToolStyle = "typescript",
        allow_media: bool = False,
        trust_content: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation; options and errors as in `render`.

        Only the template's own control tokens become control tokens, unless `trust_content`: then every special token
        name in the rendered text does, as in the published tokenizer. The ids are the same when no text from the
        messages or tools contains such a name or completes one together with its neighbours.
        """
        variables = self._variables(messages, tools, tool_style, allow_media)
        if trust_content:
            rendered = self._render(variables, thinking, add_generation_prompt, preserve_thinking)
            return tokenizer.encode(rendered, allow_special=True)
        guard = MarkerGuard(tokenizer, [self._source, *texts_in(variables)])
        protected = guard.protect({**variables, "messages": None})
        protected["messages"] = [_protect_message(guard, message) for message in variables["messages"]]
        return guard.encode(self._render(protected, thinking, add_generation_prompt, preserve_thinking))

    @staticmethod
    def _variables(
        messages: list[Any], tools: list[dict[str, Any]] | None, tool_style: ToolStyle, allow_media: bool
    ) -> dict[str, Any]:
        """The checked template variables that hold texts from the caller."""
        check_messages(messages, allow_media=allow_media)
        if tool_style not in ("json", "typescript"):
            raise UserError(f"tool_style is {tool_style!r}, expected 'json' or 'typescript'")
        if tools is None:
            return {"messages": messages, "tools": None}
        check_tools(tools)
        if tool_style == "json":
            return {"messages": messages, "tools": tools}
        try:
            return {"messages": messages, "tools": tools, "tools_ts_str": tools_to_typescript(tools)}
        except NotExpressible:
            return {"messages": messages, "tools": sorted_by_key(tools)}

    def _render(
        self, variables: Mapping[str, Any], thinking: bool, add_generation_prompt: bool, preserve_thinking: bool
    ) -> str:
        try:
            return self._template.render(
                **variables,
                thinking=thinking,
                add_generation_prompt=add_generation_prompt,
                preserve_thinking=preserve_thinking,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"{self._name} cannot render these messages: {error}; check roles and contents") from error


def _protect_message(guard: MarkerGuard, message: Message) -> Message:
    """The message with every text protected but its role and part types, which templates compare with."""
    protected = guard.protect(message)
    if message["role"] in _ROLES:
        protected["role"] = message["role"]
    content = message.get("content")
    if isinstance(content, list):
        for part, original in zip(protected["content"], content, strict=True):
            if original["type"] in _PART_TYPES:
                part["type"] = original["type"]
    return protected


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja dialect in which published chat templates are written (that of the transformers library)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
