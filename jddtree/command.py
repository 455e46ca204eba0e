"""Command lines made from dataclasses: a field is an option, so each list of options stands once.

A field's name with hyphens is its flag; its type, its default and the help text that `option` gave it are the
parser's. A command takes any number of such dataclasses. Nothing here imports JAX, so that `--help` answers
at once.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer

Check = Callable[[Mapping[str, Any]], None]


def option(default: Any, help: str, *flags: str, **details: Any) -> Any:
    """A dataclass field that is an option. flags: its spellings, by default its name; details: as
    `typer.Option`.

    default: MISSING for an option that must be given.
    """
    metadata = {"parser": typer.Option(*flags, help=help, **details)}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def argument(help: str) -> Any:
    """A dataclass field that is an argument of the command, without a flag."""
    return field(metadata={"parser": typer.Argument(help=help)})


def command(run: str, *groups: type, check: Check | None = None) -> Callable[..., Any]:
    """A function for `typer.Typer.command` whose options are the fields of the dataclasses `groups`.

    run: "module:function", imported when the command is called, with an instance of each group. check: called
    before with all options by name; raises UserError or UsageError for what cannot be used.
    """

    def call(**values: Any) -> Any:
        if check is not None:
            check(values)
        module, name = run.split(":")
        chosen = [group(**{one.name: values[one.name] for one in fields(group)}) for group in groups]
        return getattr(import_module(module), name)(*chosen)

    parameters = [parameter for group in groups for parameter in _parameters(group)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group)
    return [_parameter(one, hints[one.name]) for one in fields(group)]


def _parameter(one: Field, kind: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    annotation = Annotated[kind, one.metadata["parser"]]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
