"""Command lines made from dataclasses, and what the end of a command means.

A field of an options dataclass is an option: its name with hyphens, its type and default, and the help text and
flags that `option` gave it. A command takes any number of such dataclasses, so each list of options stands once.
Exit codes: 0 done, 1 something the user gave cannot be used (`UserError`), 2 wrong usage, 130 Ctrl-C. A closed pipe ends
a command silently, with 1. Nothing here imports JAX, so that `--help` answers at once.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer


def option(default: Any, help: str, *flags: str, **details: Any) -> Any:
    """A dataclass field that is an option. flags: its spellings, by default its name; details: as `typer.Option`."""
    return field(default=default, metadata={"help": help, "flags": flags, "details": details})


def command(run: str, *groups: type) -> Callable[..., Any]:
    """A function for `typer.Typer.command` whose options are the fields of the dataclasses `groups`.

    run: "module:function", imported when the command is called, with an instance of each group.
    """

    def call(**values: Any) -> Any:
        module, name = run.split(":")
        chosen = [group(**{one.name: values[one.name] for one in fields(group)}) for group in groups]
        return getattr(import_module(module), name)(*chosen)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for group in groups for parameter in _parameters(group)]
    )
    call.__annotations__ = {name: one.annotation for name, one in call.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return call


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group)
    return [_parameter(one, hints[one.name]) for one in fields(group)]


def _parameter(one: Field, kind: Any) -> inspect.Parameter:
    details = one.metadata["details"]
    spelled = typer.Option(*one.metadata["flags"], help=one.metadata["help"], **details)
    default = [] if one.default is MISSING else one.default
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, spelled]
    )
