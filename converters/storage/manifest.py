"""The manifest of a store: what every file must be. It is written last, so a store never looks complete
before it is.

manifest.json holds {format, version, parts}; a part has {source, parameters, files}. Nothing in it depends on
time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from converters.file_names import inside
from converters.pieces import Layout, Table, layout
from jddtree.config.fields import read_json
from jddtree.errors import UserError

FORMAT = "jddtree store"
VERSION = 2
MANIFEST = "manifest.json"
JOURNAL = "convert.journal"  # there while a conversion is unfinished
PARTS = ("target", "drafter")
CRC = re.compile("[0-9a-f]{1,8}")
SHOWN = 300  # characters of what is wrong with a manifest
DTYPES: Mapping[str, npt.DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int32": np.int32,
}


@dataclass(frozen=True)
class File:
    """One file of a part: bytes and CRC-32."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Part:
    """What the manifest says about a target or drafter.

    source: fingerprint of the folder it was made from (`converters.storage.plan`). parameters: path to
    (shape, dtype name). files: by path in the part's folder.
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
                        path: {"shape": list(shape), "dtype": dtype}
                        for path, (shape, dtype) in part.parameters.items()
                    },
                    "files": {
                        path: {"bytes": file.nbytes, "crc32": f"{file.crc32:08x}"}
                        for path, file in part.files.items()
                    },
                }
                for name, part in parts.items()
            },
        },
        indent=1,
    )


def read_manifest(directory: Path) -> dict[str, Part]:
    """The parts of a store. Raises UserError for another version, for what is no manifest, and for one that
    names files outside the store.
    """
    path = Path(directory) / MANIFEST
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise UserError(
            f"{path} is no manifest of a store (format {values.get('format')!r}, wanted {FORMAT!r})"
        )
    if values.get("version") != VERSION:
        raise UserError(
            f"{directory} is a store of version {values.get('version')!r}, but this program reads "
            f"version {VERSION}; convert the checkpoint again with --force"
        )
    try:
        return _parts(values["parts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = repr(error)[:SHOWN]
        raise UserError(f"{path} is damaged ({text}); convert the checkpoint again with --force") from None


def fingerprint(value: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint (`plan.py`): sizes, or times of change, by file, and a digest. ValueError for another."""
    for name in ("files", *(["changed"] if "changed" in value else [])):
        _require(all(type(size) is int for size in value[name].values()), f"source.{name}", value[name])
    _require(isinstance(value["digest"], str), "source.digest", value["digest"])
    return dict(value)


def _parts(values: Mapping[str, Any]) -> dict[str, Part]:
    _require(bool(values) and set(values) <= set(PARTS), "parts", list(values))
    return {name: _part(value) for name, value in values.items()}


def _part(value: Mapping[str, Any]) -> Part:
    return Part(
        source=fingerprint(value["source"]),
        parameters={path: _parameter(entry) for path, entry in value["parameters"].items()},
        files={name: _file(name, entry) for name, entry in value["files"].items()},
    )


def _parameter(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    shape, dtype = entry["shape"], entry["dtype"]
    _require(isinstance(shape, list) and all(type(size) is int for size in shape), "shape", shape)
    _require(isinstance(dtype, str) and dtype in DTYPES, "dtype", dtype)
    return tuple(shape), dtype


def _file(name: str, entry: Mapping[str, Any]) -> File:
    size, crc = entry["bytes"], entry["crc32"]
    _require(inside(name), "files", name)
    _require(type(size) is int and size >= 0, "bytes", size)
    _require(isinstance(crc, str) and CRC.fullmatch(crc) is not None, "crc32", crc)
    return File(size, int(crc, 16))


def _require(good: bool, name: str, value: Any) -> None:
    if not good:
        raise ValueError(f"{name}: {value!r}")
