"""Rows that survive a kill: a JSON-lines file that is appended to as answers come, and found again by the
next run.

Contract: DIR/samples_<task>_<time>.jsonl begins with a header line {"header": {settings}}; each further line
is one row with "doc_id". A row is on the disk before `append` returns. A run is finished when
DIR/results_<time>.json exists; until then the next run with the same settings goes on with it, and one with
other settings is refused. Two runs at a time in one folder are refused as well.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from jddtree.errors import UserError

Row = dict[str, Any]


def run_time(folder: Path) -> str:
    """The <time> of the unfinished run in a folder, the newest if there are several; else a new one."""
    times = {path.stem.rsplit("_", 1)[1] for path in folder.glob("samples_*_*.jsonl")}
    unfinished = [time for time in times if not results_file(folder, time).exists()]
    return max(unfinished) if unfinished else datetime.now().isoformat().replace(":", "-")


def results_file(folder: Path, time: str) -> Path:
    """Where the results of a run go."""
    return folder / f"results_{time}.json"


def samples_file(folder: Path, task: str, time: str) -> Path:
    """Where a task's rows go; what a file name cannot hold becomes "-"."""
    return folder / f"samples_{re.sub(r'[^A-Za-z0-9.-]+', '-', task)}_{time}.jsonl"


class Samples:
    """The rows of one task, open for appending. rows: "doc_id" to row, those that an earlier run wrote
    included.
    """

    def __init__(self, path: Path, settings: Row):
        """Open or create. Raises UserError for other settings than the file's, for a line that is no row,
        when another process has the file open, and when it cannot be written.
        """
        self.path, self.settings, self.rows = path, settings, dict[int, Row]()
        self._file = _open(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines()  # the rest was cut off by a kill
        self._file.truncate(data.rfind(b"\n") + 1)
        if not lines:
            self._write({"header": self.settings})
            return
        check_settings(self.path, self._parse(lines[0], 1, "header")["header"], self.settings)
        for number, line in enumerate(lines[1:], 2):
            row = self._parse(line, number, "doc_id")
            self.rows[row["doc_id"]] = row

    def _parse(self, line: bytes, number: int, key: str) -> Row:
        try:
            value = json.loads(line)
            value[key]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path} line {number} is no {key} line; move the file away to start over"
            ) from None
        return value

    def append(self, row: Row) -> None:
        """Add a row; it is on the disk on return."""
        self._write(row)
        self.rows[row["doc_id"]] = row

    def _write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> list[Row]:
        """Put the rows in the order of "doc_id", in one step; returns them."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        replace_file(self.path, b"".join(_line(row) for row in [{"header": self.settings}, *rows]))
        return rows

    def close(self) -> None:
        """Close the file and give up its lock."""
        self._file.close()


def check_settings(path: Path, old: Row, new: Row) -> None:
    """Raise UserError naming the first setting that differs from those with which a file was begun."""
    for key in {**old, **new}:
        if old.get(key) != (value := json.loads(json.dumps(new.get(key)))):
            raise UserError(
                f"{path} is an unfinished run with {key} {old.get(key)!r}, but this one has {value!r}; "
                "run it to its end with its own settings, or give another --output"
            )


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole: after a kill there is the old one or the new one."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a finished file, without its header."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[1:-1]]


def missing(samples: Samples, count: int) -> Iterable[int]:
    """The "doc_id"s below `count` that have no row yet."""
    return (index for index in range(count) if index not in samples.rows)


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
        file.seek(0)
    except OSError as error:
        raise UserError(
            f"--output {path} cannot be written ({error.strerror}); give another folder"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"{path} is being written by another run; wait for it, or give another --output"
        ) from None
    return file
