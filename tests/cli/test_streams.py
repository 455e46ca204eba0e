"""Standard streams that are closed, full or not UTF-8: one line or the whole answer, never a traceback or a
hang.
"""

import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT, micro_target

from jddtree import streams
from jddtree.cli.terminal.progress import Bars, Counter
from jddtree.errors import UserError

CLOSED = "error: standard output is closed, so no answer can be written; send it to a file or to /dev/null\n"
FULL = "error: standard output cannot be written (No space left on device); send it to where there is room\n"
NO_INPUT = "error: standard input is closed, so --prompt - has nothing to read; send it a text\n"


def shell(command: str, **changes) -> subprocess.Popen:
    """`run.py` with arguments and redirections."""
    line = f"{sys.executable} {ROOT / 'run.py'} {command}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, shell=True, env=os.environ | changes, **pipes)


def test_every_command_ends_with_a_line_or_its_answer() -> None:
    """All at once; `inspect` stands for commands that print, a missing command for errors."""
    inspect = f"inspect {micro_target()}"
    wanted = {
        "--help >&-": (1, CLOSED),
        "--help >/dev/full": (1, FULL),
        "--version >/dev/full": (1, FULL),
        f"{inspect} >&-": (1, CLOSED),
        f"{inspect} --json >/dev/full": (1, FULL),
        f"{inspect} >/dev/null 2>&-": (0, ""),
        f"{inspect} >/dev/null <&- 2>/dev/full": (0, ""),
        "dance 2>&-": (2, ""),
        "dance 2>/dev/full": (2, ""),
        "generate -p - <&-": (1, NO_INPUT),
    }
    running = {command: shell(command) for command in wanted}
    for command, process in running.items():
        answer, errors = process.communicate(timeout=120)
        assert (process.returncode, errors, answer) == (*wanted[command], ""), command


def test_a_reader_that_went_away_is_silent() -> None:
    with shell("--help | true") as process:
        assert process.communicate(timeout=60) == ("", "")


@pytest.fixture
def ascii_pipe():
    """A pipe's ends, and a text stream that is ASCII as under PYTHONIOENCODING=ascii."""
    reading, writing = os.pipe()
    yield reading, writing, io.TextIOWrapper(io.BytesIO(), "ascii")
    os.close(reading)


def test_what_an_encoding_lacks_is_escaped(ascii_pipe) -> None:
    reading, writing, like = ascii_pipe
    stream = streams.answer_stream(writing, like)
    print("né 你 🚀 \ufffd \udcff", file=stream, flush=True)
    os.close(writing)
    assert os.read(reading, 100) == rb"n\xe9 \u4f60 \U0001f680 \ufffd \udcff" + b"\n"


def test_a_full_answer_is_an_error_and_a_full_report_is_none(ascii_pipe) -> None:
    *_, like = ascii_pipe
    full = os.open("/dev/full", os.O_WRONLY)
    answer, message = streams.answer_stream(full, like), streams.message_stream(full, None)
    print("lost", file=message, flush=True)
    answer.write("an answer")
    with pytest.raises(UserError, match="No space left on device"):
        answer.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), full)
    answer.flush()


def test_a_closed_pipe_stays_one(ascii_pipe) -> None:
    reading, writing, like = ascii_pipe
    os.close(os.dup(reading))
    stream = streams.answer_stream(writing, like)
    broken = os.open(os.devnull, os.O_RDONLY)
    os.dup2(broken, reading)
    stream.write("x")
    with pytest.raises(BrokenPipeError):
        stream.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    stream.flush()


def test_without_stderr_there_are_no_bars(monkeypatch) -> None:
    """tqdm would take locks that it never gives back."""
    monkeypatch.setattr(sys, "stderr", None)
    with Bars(False) as bars, Counter(False) as counter:
        bars.update("target", 1, 2)
        counter.update("task", 1, 2)
        assert bars.bar.disable and counter.bar.disable
