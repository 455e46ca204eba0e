"""The manifest of a store: what every file must be. It is written last, so a store never looks complete before it is.

manifest.json holds {format, version, parts}; a part has {source, parameters, files}. Nothing in it depends on time.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from converters.pieces import Layout, Table, layout
from jddtree.config import read_json
from jddtree.errors import UserError

FORMAT = "jddtree store"
VERSION = 2
MANIFEST = "manifest.json"
JOURNAL = "convert.journal"  # there while a conversion is unfinished
PARTS = ("target", "drafter")
DTYPES: Mapping[str, npt.DTypeLike] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int32": np.int32}


@dataclass(frozen=True)
class File:
    """One file of a part: bytes and CRC-32."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Part:
    """What the manifest says about a target or drafter.

    source: fingerprint of the folder it was made from (`converters.plan`). parameters: path to (shape, dtype name).
    files: by path in the part's folder.
    """

    source: Mapping[str, Any]
    parameters: Mapping[str, tuple[tuple[int, ...], str]]
    files: Mapping[str, File]


def file_name(path: str, cut: Layout, piece: int) -> str:
    """The file of one piece, in the part's folder."""
    return f"{path}/{piece:03}.bin" if "." in path else f"{path}.bin"


def part_files(table: Table) -> Iterator[tuple[str, str, int, Layout]]:
    """(file name, path, piece, layout) of every .bin file of a part."""
    for path in table:
        cut = layout(table, path)
        for piece in range(cut.count):
            yield file_name(path, cut, piece), path, piece, cut


def manifest_text(parts: Mapping[str, Part]) -> str:
    """The content of manifest.json."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "parts": {
                name: {
                    "source": part.source,
                    "parameters": {
                        path: {"shape": list(shape), "dtype": dtype} for path, (shape, dtype) in part.parameters.items()
                    },
                    "files": {
                        path: {"bytes": file.nbytes, "crc32": f"{file.crc32:08x}"} for path, file in part.files.items()
                    },
                }
                for name, part in parts.items()
            },
        },
        indent=1,
    )


def read_manifest(directory: Path) -> dict[str, Part]:
    """The parts of a store. Raises UserError for another version and for what is no manifest."""
    path = Path(directory) / MANIFEST
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise UserError(f"{path} is no manifest of a store (format {values.get('format')!r}, wanted {FORMAT!r})")
    if values.get("version") != VERSION:
        raise UserError(
            f"{directory} is a store of version {values.get('version')!r}, but this program reads version {VERSION}; "
            "convert the checkpoint again with --force"
        )
    try:
        return {name: _part(value) for name, value in values["parts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); convert the checkpoint again with --force") from None


def _part(value: Mapping[str, Any]) -> Part:
    return Part(
        source=dict(value["source"]),
        parameters={path: (tuple(entry["shape"]), str(entry["dtype"])) for path, entry in value["parameters"].items()},
        files={name: File(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in value["files"].items()},
    )
