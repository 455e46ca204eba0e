"""The kinds of drafters, a line each.

A line names where the kind's parts stand, as "module:attribute". A part is imported when it is first needed, so that
`inspect` and `convert` read a drafter's folder without JAX, and decoding never meets a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol


class DrafterConfig(Protocol):
    """What the configuration of every drafter says; a frozen dataclass, since programs are compiled for it."""

    kind: ClassVar[str]
    """A key of `KINDS`."""

    @property
    def block_size(self) -> int:
        """Most tokens that a round emits: a draft is at most one less deep, and the target adds its own."""

    @property
    def most_candidates(self) -> int:
        """Most different candidates that it can give for one depth."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """0-based target layers whose output the drafter is given, ascending."""

    def of_target(self) -> Mapping[str, tuple[str, int]]:
        """What only fits one target: the drafter's name of a number, to the target's name of it and its value."""


@dataclass(frozen=True)
class Kind:
    """Parts of a kind as "module:attribute".

    model: the `jddtree.models.drafters.base.Drafter`, a class that takes the configuration. checkpoint: the
    `converters.drafters.Format` of its folders. config: the configuration of a kind that has no folder, whose name is
    then what --draft takes. A kind has a checkpoint or a config.
    """

    model: str
    checkpoint: str | None = None
    config: str | None = None


KINDS = {
    "dflash": Kind("jddtree.models.drafters.dflash:DFlash", checkpoint="converters.dflash:FORMAT"),
    "ngram": Kind("jddtree.models.drafters.ngram:Ngram", config="jddtree.models.drafters.ngram:NgramConfig"),
}


def model_of(config: DrafterConfig) -> Any:
    """The drafter of a configuration, a `jddtree.models.drafters.base.Drafter`."""
    return resolve_name(KINDS[config.kind].model)(config)


def format_named(kind: str) -> Any:
    """The `converters.drafters.Format` of a kind; None for one without folders."""
    checkpoint = KINDS[kind].checkpoint
    return None if checkpoint is None else resolve_name(checkpoint)


def without_folder(draft: str | Path, **switches: Any) -> DrafterConfig | None:
    """The configuration that a name stands for, None where `draft` is no name but a folder.

    switches: fields of the configuration to set.
    """
    kind = KINDS.get(str(draft))
    return None if kind is None or kind.config is None else resolve_name(kind.config)(**switches)
