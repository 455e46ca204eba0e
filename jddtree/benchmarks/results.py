"""The form of every measured result: what was run, when, on what, and the rows.

docs/results/NAME-CARD.json holds {command, date, commit, card, versions, rows}; README tables are made from these
files.
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

import jddtree

Row = dict[str, Any]


def record(rows: list[Row]) -> dict[str, Any]:
    """The object to write for rows measured by this process."""
    return {
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "card": card(),
        "versions": {"jddtree": jddtree.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "rows": rows,
    }


def command() -> str:
    """How this process was started, a module by its name and a script by its file's."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = [Path(sys.argv[0]).name] if spec is None else ["-m", spec.name]
    return " ".join(["python", *program, *sys.argv[1:]])


def commit() -> str:
    """What the environment variable JDDTREE_COMMIT says, for copies of the source tree; else the commit of the tree,
    with "+changes" when it has uncommitted ones; "unknown" outside a checkout."""
    if stated := os.environ.get("JDDTREE_COMMIT"):
        return stated
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def card() -> str:
    """The device that ran it; for a CPU its model and how many cores JAX may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.processor()} ({len(names)} cores)"


def write(path: Path, rows: list[Row]) -> None:
    """Write a results file; an existing one is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(rows), indent=1) + "\n", encoding="utf-8")


def table(rows: list[Row], columns: dict[str, str]) -> str:
    """Markdown table. columns: key of a row to the format of its cell, like ".2f"."""
    lines = ["| " + " | ".join(key.replace("_", " ") for key in columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(format(row[key], form) for key, form in columns.items()) + " |")
    return "\n".join(lines)
