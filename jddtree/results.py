"""The form of every measured result: what was run, when, on what, and the rows.

docs/results/NAME-CARD.json holds {command, date, commit, card, versions, rows}; README tables are made from
these files.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from jddtree.errors import UserError
from jddtree.version import VERSION

Row = dict[str, Any]
Report = dict[str, list[Row]]
"""Rows by the name of their table."""
Versions = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent
MEASURED = (".", ":(exclude)docs")  # of the checkout: what a measurement may depend on


def record(rows: list[Row], card_name: str | None = None, versions: Versions | None = None) -> dict[str, Any]:
    """The object to write for rows measured by this process.

    card_name and versions: of a process that measures without JAX; by default the device and version of
    JAX's.
    """
    shared = {"jddtree": VERSION, "python": platform.python_version()}
    return {
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "card": card_name or card(),
        "versions": shared | (versions or {"jax": jax.__version__}),
        "rows": rows,
    }


def command() -> str:
    """How this process was started, a module or a package by its name and a script by its file's."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = [Path(sys.argv[0]).name] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return " ".join(["python", *program, *sys.argv[1:]])


def commit() -> str:
    """What the environment variable JDDTREE_COMMIT says, for copies of the source tree; else the commit of
    the checkout that this package lies in, with "+changes" when a tracked file outside docs/ differs;
    "unknown" elsewhere.

    What docs/ holds changes nothing that is measured, and a results file may be one that is written just now.
    Bits of permission do not count, since a copy of a checkout may lose them.
    """
    if stated := os.environ.get("JDDTREE_COMMIT"):
        return stated
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "unknown"
        changes = _git("-c", "core.fileMode=false", "status", "--porcelain", "-uno", "--", *MEASURED)
        return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def card() -> str:
    """The device that ran it; for a CPU its model and how many cores JAX may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.processor()} ({len(names)} cores)"


def write(path: Path, rows: list[Row]) -> None:
    """Write a results file for rows measured by this process; an existing one is replaced."""
    write_record(path, record(rows))


def write_record(path: Path, made: dict[str, Any]) -> None:
    """Write what `record` made; an existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def read_rows(path: Path, option: str) -> list[Row]:
    """The rows of a results file, or those of a bare JSON list. UserError that names the option for anything
    else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None
    rows = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{option} {path} must be a results file or a JSON list of rows")
    return rows


def table(rows: list[Row], columns: dict[str, str]) -> str:
    """Markdown table. columns: key of a row to the format of its cell, like ".2f"."""
    lines = [
        "| " + " | ".join(key.replace("_", " ") for key in columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    for row in rows:
        lines.append("| " + " | ".join(format(row[key], form) for key, form in columns.items()) + " |")
    return "\n".join(lines)


def versions() -> Versions:
    """Versions of what a result depends on, and the device."""
    return {
        "jddtree": VERSION,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def version_line() -> str:
    """The versions in one line."""
    return ", ".join(f"{name} {value}" for name, value in versions().items())
