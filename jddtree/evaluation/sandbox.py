"""Runs a program that a model wrote, in a subprocess with limits; contract: it answers in bounded time and memory.

Every program gets a fresh interpreter (`-I`: no user site, no PYTHON* variables), an empty temporary folder as working
folder and home, an environment of five variables, no input, its own session, and limits on processor time, address
space, file size, processes, open files and core dumps. At the end, or when time is up, its process group is killed
and the folder removed. It has passed only if a secret that its guard holds came back after its last line had run, so
leaving early (`sys.exit(0)`, `os._exit(0)`) is not a pass. Only the first kilobytes of its output are kept.

On Linux three layers are added where the system offers them; `Outcome.layers` says which held:
    "network namespace"  no interface leads anywhere (unprivileged user namespaces)
    "write fence"        files can be changed only in its folder (Landlock)
    "call filter"        no new process, no program start, no signal to others, no socket (seccomp)

What it does not protect from. This is a guard against mistakes of a model, not against an attacker:
    - Everything the user may read can be read, such as keys in the home folder; with neither of the layers against
      network use it can also be sent away.
    - Without the write fence it can change or delete whatever the user may; with it, file modes and times still.
    - Without the call filter it can start processes (for root the process limit does not count), which may leave the
      group before it is killed, and it can signal any process of the user, this one included.
    - The number of files, hence disk space, is bounded only by time. On macOS the memory limit may have no effect.
    - A program may search its own interpreter for the secret, or make objects that equal everything, and so pass.
    - Errors in the kernel or in the interpreter.
Use a container or a virtual machine where that is not enough.
"""

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GUARD = Path(__file__).with_name("guard.py")
REPORT_BYTES = 16_384
READ_BYTES = 65_536


@dataclass(frozen=True)
class Outcome:
    """passed: the program ran to its end without an error; note: otherwise why not, in one line; output: the beginning
    of what it printed; layers: which of the layers in the module's docstring held.
    """

    passed: bool
    note: str
    output: str = ""
    layers: tuple[str, ...] = ()


def run_code(
    source: str,
    *,
    seconds: float = 10.0,
    memory_bytes: int = 2**30,
    file_bytes: int = 2**24,
    processes: int = 64,
    open_files: int = 64,
    output_bytes: int = 4096,
) -> Outcome:
    """Run Python source to its end, for at most `seconds` of wall time. Never raises for anything the source does."""
    job = {
        "source": source,
        "nonce": secrets.token_hex(16),
        "processor_seconds": math.ceil(seconds) + 1,
        "memory_bytes": memory_bytes,
        "file_bytes": file_bytes,
        "processes": processes,
        "open_files": open_files,
    }
    with tempfile.TemporaryDirectory(prefix="jddtree-code-", ignore_cleanup_errors=True) as folder:
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        status, output, report = _watch(folder, seconds, output_bytes)
    return _outcome(status, output, report, str(job["nonce"]), seconds)


def _watch(folder: str, seconds: float, output_bytes: int) -> tuple[int | None, bytes, bytes]:
    """Run the guard in the folder; its exit status (None: time was up), and the beginnings of output and report."""
    deadline = time.monotonic() + seconds
    read_end, write_end = os.pipe()
    process = _start(folder, write_end)
    os.close(write_end)
    assert process.stdout is not None
    kept = {process.stdout.fileno(): bytearray(), read_end: bytearray()}
    room = {process.stdout.fileno(): output_bytes, read_end: REPORT_BYTES}
    try:
        status = _pump(process, deadline, kept, room)
    finally:
        _kill_group(process)
        output = bytes(kept[process.stdout.fileno()])
        process.stdout.close()
        os.close(read_end)
    return status, output, bytes(kept[read_end])


def _start(folder: str, report: int) -> "subprocess.Popen[bytes]":
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-I", "-B", str(GUARD), str(report)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        pass_fds=(report,),
        start_new_session=True,
    )


def _pump(
    process: "subprocess.Popen[bytes]", deadline: float, kept: dict[int, bytearray], room: dict[int, int]
) -> int | None:
    """Read both pipes so that the program never waits for us, keep what there is room for, until it ends."""
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            status = process.poll()
            _read_ready(selector, 0.0 if status is not None else min(left, 0.02), kept, room)
            if status is not None:
                return status
    return None


def _read_ready(
    selector: selectors.BaseSelector, wait: float, kept: dict[int, bytearray], room: dict[int, int]
) -> None:
    for key, _ in selector.select(wait):
        data = os.read(key.fd, READ_BYTES)
        if not data:
            selector.unregister(key.fd)
        kept[key.fd] += data[: room[key.fd] - len(kept[key.fd])]


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill all of the program's session that has not left it, and collect the exit status."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int | None, output: bytes, report: bytes, nonce: str, seconds: float) -> Outcome:
    lines = [line for line in map(_parse, report.splitlines()) if line is not None]
    layers = tuple(map(str, lines[0].get("layers", ()))) if lines else ()
    text = output.decode("utf-8", "replace")
    if status is None:
        return Outcome(False, f"timed out after {seconds:g} s", text, layers)
    verdicts = [line for line in lines if line.get("nonce") == nonce]
    if verdicts:
        return Outcome(verdicts[-1]["passed"] is True, _one_line(verdicts[-1]["note"]), text, layers)
    return Outcome(False, _why_silent(status), text, layers)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _one_line(note: str) -> str:
    """The note without line breaks and without characters that no file can hold."""
    return " ".join(note.encode("utf-8", "backslashreplace").decode("utf-8").split())


def _why_silent(status: int) -> str:
    """Why a process ended without a verdict."""
    if status == -signal.SIGXCPU:
        return "used more processor time than allowed"
    if status < 0:
        return f"killed by signal {-status} ({signal.strsignal(-status) or 'unknown'})"
    return f"ended early with exit status {status}"
