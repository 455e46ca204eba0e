"""Conversations to prompts, by the chat template of the model folder.

Contract: `render` gives the template's text and `encode` the ids of exactly this text. By default only names
of control tokens that the template wrote become control tokens (origin.py says which characters it wrote):
what comes from messages and tools (content, names, roles, ids, schemas) stays ordinary text, whatever the
template does with it. All other ids equal those of the published tokenizer, which parses the whole rendered
text and so lets messages forge control tokens.
`trust_content=True` repeats the published behaviour.

A template runs in a sandbox (template/environment.py) and may use 5 seconds of processor time, 2^24
characters for the prompt or any other value (items of lists count 64), 2^30 for all values together and a
source of 2^16 characters (template/bounds.py). Whatever goes wrong in it is one line of `UserError`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jinja2

from jddtree.errors import UserError
from jddtree.text.messages import check_messages, check_tools
from jddtree.text.template.bounds import MAX_SOURCE, TemplateLimit
from jddtree.text.template.environment import TemplateEnvironment
from jddtree.text.template.origin import origin_of, written
from jddtree.text.token_files import read_json
from jddtree.text.tokenizer import Tokenizer
from jddtree.text.tools import NotExpressible, sorted_by_key, tools_to_typescript

Message = dict[str, Any]
ToolStyle = Literal["json", "typescript"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template that name a special token, as in the transformers library."""
_MORE_TOKENS = "additional_special_tokens"
_WRITTEN_RUN = re.compile(rb"\x01+")
_REASON_LENGTH = 200
_ADVICE = "download the template again"


class ChatTemplate:
    """One compiled chat template; immutable, usable from several threads."""

    def __init__(
        self, source: str, name: str = "chat template", special_tokens: Mapping[str, Any] | None = None
    ):
        """Compile a Jinja template; `name` is where it came from, `special_tokens` are variables by name.

        Raises UserError when the source is too long or Jinja cannot compile it.
        """
        self._name = name
        self._special_tokens = dict(special_tokens or {})
        self._environment = TemplateEnvironment()
        if len(source) > MAX_SOURCE:
            raise UserError(f"{name} has {len(source)} characters, expected at most {MAX_SOURCE}; shorten it")
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name} line {error.lineno}: {error.message}; {_ADVICE}") from error
        except Exception as error:
            raise UserError(f"{name} cannot be compiled: {_reason(error)}; {_ADVICE}") from error

    @classmethod
    def from_directory(cls, path: str | Path) -> "ChatTemplate":
        """The template in `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`.

        The special tokens are those of `tokenizer_config.json`, if it exists. Raises UserError when the
        folder has neither template, or the template does not compile.
        """
        file = Path(path) / "chat_template.jinja"
        config = Path(path) / "tokenizer_config.json"
        fields = read_json(config) if config.exists() or not file.exists() else {}
        if file.exists():
            return cls(_read_source(file), str(file), _special_tokens(fields))
        source = fields.get("chat_template")
        if not isinstance(source, str):
            raise UserError(
                f"{file} does not exist and {config} has chat_template {str(source)[:40]!r}, expected a "
                "template; copy chat_template.jinja of the model into the folder"
            )
        return cls(source, f"chat_template in {config}", _special_tokens(fields))

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

        `thinking=False` opens the answer with empty reasoning (instant mode); `preserve_thinking` keeps the
        reasoning of past turns; `tool_style` declares tools as TypeScript (as the published tokenizer does;
        tools that have no such form are declared as JSON, sorted by key) or as JSON in the given order.
        `allow_media` renders placeholders for images, which this engine cannot see. The options are those of
        K2.6's template.

        Raises UserError for bad messages or tools, and when the template refuses them.
        """
        variables = self._variables(messages, tools, tool_style, allow_media)
        return str.__str__(self._render(variables, thinking, add_generation_prompt, preserve_thinking))

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

        Only names of control tokens that the template wrote, all characters of them, become control tokens,
        unless `trust_content`: then every name in the rendered text does, as in the published tokenizer. The
        ids are the same when no text from the messages or tools contains such a name or completes one
        together with its neighbours.
        """
        variables = self._variables(messages, tools, tool_style, allow_media)
        rendered = self._render(variables, thinking, add_generation_prompt, preserve_thinking)
        text = str.__str__(rendered)
        if trust_content:
            return tokenizer.encode(text, allow_special=True)
        return tokenizer.encode_with_markers(text, _written_markers(tokenizer, text, origin_of(rendered)))

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
        variables = {"messages": messages, "tools": sorted_by_key(tools)}
        try:
            return variables | {"tools_ts_str": tools_to_typescript(tools)}
        except NotExpressible:
            return variables

    def _render(
        self,
        variables: Mapping[str, Any],
        thinking: bool,
        add_generation_prompt: bool,
        preserve_thinking: bool,
    ) -> str:
        options = {
            "thinking": thinking,
            "add_generation_prompt": add_generation_prompt,
            "preserve_thinking": preserve_thinking,
            "documents": None,
        }
        try:
            with self._environment.limited():
                context = self._template.new_context({**self._special_tokens, **options, **variables})
                return self._environment.concat(self._template.root_render_func(context))
        except Exception as error:
            raise UserError(
                f"{self._name} cannot render these messages: {_reason(error)}; check roles and contents"
            ) from error


def _written_markers(tokenizer: Tokenizer, text: str, origin: bytes) -> list[tuple[int, int]]:
    """Ranges of the control tokens' names that the template wrote, from left to right."""
    markers: list[tuple[int, int]] = []
    for run in _WRITTEN_RUN.finditer(origin):
        start = run.start()
        names = tokenizer.find_markers(text[start : run.end()])
        markers += [(start + first, start + last) for first, last in names]
    return markers


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables that a tokenizer's configuration sets; each counts as written by the template."""
    named = {name: _token_text(fields.get(name)) for name in SPECIAL_TOKENS}
    tokens: dict[str, Any] = {name: written(text) for name, text in named.items() if text}
    more = fields.get(_MORE_TOKENS)
    if isinstance(more, list):
        tokens[_MORE_TOKENS] = [written(text) for text in map(_token_text, more) if text]
    return tokens


def _token_text(value: Any) -> str | None:
    """The text of a special token, which is given as itself or as the `content` of an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); check the file and its permissions") from error


def _reason(error: Exception) -> str:
    """What went wrong, short; errors of Python itself are named."""
    text = str(error)[:_REASON_LENGTH] or "no message"
    return (
        text if isinstance(error, jinja2.TemplateError | TemplateLimit) else f"{type(error).__name__}: {text}"
    )
