"""Drafter folders of any kind: which kind one is, its configuration, and how its tensors are read.

The kinds stand in `jddtree.drafter_kinds`; a converter describes its own in one `Format`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from converters.pieces import TensorReader
from jddtree.config_fields import read_json
from jddtree.drafter_kinds import KINDS, DrafterConfig, format_named, without_folder
from jddtree.errors import UserError
from jddtree.models.parameters import Parameter


class DrafterReader(TensorReader, Protocol):
    """A reader of a drafter's folder. faults: what does not fit its configuration, as phrases."""

    @property
    def faults(self) -> list[str]:
        """See the class."""


class MakeReader(Protocol):
    """What makes a reader; with `check` tensors that do not fit are an error."""

    def __call__(self, directory: Path, config: Any, *, check: bool = True) -> DrafterReader: ...


@dataclass(frozen=True)
class Format:
    """The folders of one kind of drafter. Functions of its configuration take it as their only argument.

    recognises: whether the values of a config.json are such a drafter's. config: the configuration of a folder, by its
    path and switches of its own; raises UserError for what is not supported. parameters: its table, by dotted path.
    tensors: Hugging Face name, without `prefix`, to (safetensors dtype, shape). reader: of the folder's tensors.
    whole: counts that a mesh must divide, by field name. cached_numbers: that a token of context takes in the draft
    state. note: what a reader of memory sizes should know.
    """

    recognises: Callable[[Mapping[str, Any]], bool]
    config: Callable[..., DrafterConfig]
    parameters: Callable[[Any], dict[str, Parameter]]
    tensors: Callable[[Any], dict[str, tuple[str, tuple[int, ...]]]]
    reader: MakeReader
    prefix: str
    whole: Callable[[Any], Mapping[str, int]]
    cached_numbers: Callable[[Any], int]
    note: str


def is_drafter(values: Mapping[str, Any]) -> bool:
    """Whether the values of a config.json are those of a drafter."""
    return any(form.recognises(values) for form in _formats())


def read_config(folder: Path, **switches: Any) -> DrafterConfig:
    """The configuration of a drafter's folder. switches: those of its kind's reader.

    A folder of no known kind is read as one of the last kind, whose error says what it lacks. Raises UserError.
    """
    if without_folder(folder) is not None:
        raise UserError(f"{folder} is a drafter without weights, so there is no folder to read; give the path of one")
    formats = _formats()
    values = read_json(Path(folder) / "config.json")
    form = next((form for form in formats if form.recognises(values)), formats[-1])
    return form.config(Path(folder), **switches)


def format_of(config: DrafterConfig) -> Format:
    """The format of the folders that such a configuration comes from."""
    form: Format = format_named(config.kind)
    return form


def _formats() -> list[Format]:
    return [form for form in map(format_named, KINDS) if form is not None]
