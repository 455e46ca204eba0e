"""Runs a program that a model wrote, in a subprocess with limits; contract: it answers in bounded time and
memory.

Every program gets a fresh interpreter (`-I`: no user site, no PYTHON* variables), an empty temporary folder
as working folder and home, an environment of five variables, no input, its own session, and limits on
processor time, address space, file size, processes, open files and core dumps. At the end, or when time is
up, its process group is killed and the folder removed. It has passed only if a secret that its guard holds
came back after its last line had run, so leaving early (`sys.exit(0)`, `os._exit(0)`) is not a pass. Only the
first kilobytes of its output are kept.

On Linux five layers are added where the system offers them; `Outcome.layers` says which held:
    "network namespace"  no interface leads anywhere (unprivileged user namespaces) "process namespace"  no
    process outside has a number, none inside outlives the program, nor does shared memory "write fence"
    files can be changed only in its folder (Landlock) "signal fence"       no signal reaches a process
    outside (Landlock of Linux 6.12) "call filter"        none of the calls in `call_filter.py`: no new
    process, no program start, no signal to others or
                         change of their limits, priority and processors, no socket, no shared memory, no key
(seccomp) Root's capabilities are given up with them.

What it does not protect from. This is a guard against mistakes of a model, not against an attacker:
    - Everything the user may read can be read, such as keys in the home folder; with neither of the layers
      against network use it can also be sent away.
    - Without the write fence it can change or delete whatever the user may; with it, file modes, times,
      attributes and locks still.
    - With neither process namespace nor call filter it can start processes (for root the process limit does
      not count), which may leave the group before it is killed, hold memory that no limit counts and that
      stays, and change limits, priority and processors of any process of the user, this one included. Without
      the signal fence too, it can signal them.
    - The number of files, hence disk space (or memory, where the temporary folder is in it), is bounded only
      by time. On macOS the memory limit may have no effect.
    - A program may search its own interpreter for the secret, or make objects that equal everything, and so
    pass.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jddtree.evaluation.sandbox.temporary import temporary_folder

GUARD = Path(__file__).with_name("confinement.py")
REPORT_BYTES = 16_384
READ_BYTES = 65_536
NOTE_CHARACTERS = 400


@dataclass(frozen=True)
class Outcome:
    """passed: the program ran to its end without an error; note: otherwise why not, in one line; output: the
    beginning of what it printed; layers: which of the layers in the module's docstring held.
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
    """Run Python source to its end, for at most `seconds` of wall time. Never raises for anything the source
    does.
    """
    job = {
        "source": source,
        "nonce": secrets.token_hex(16),
        "processor_seconds": math.ceil(seconds) + 1,
        "memory_bytes": memory_bytes,
        "file_bytes": file_bytes,
        "processes": processes,
        "open_files": open_files,
    }
    with temporary_folder("jddtree-code-") as folder:
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        status, output, report = _watch(folder, seconds, output_bytes)
    return _outcome(status, output, report, str(job["nonce"]), seconds)


def _watch(folder: str, seconds: float, output_bytes: int) -> tuple[int | None, bytes, bytes]:
    """Run the guard in the folder; its exit status (None: time was up), and the beginnings of output and
    report.
    """
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
    environment = {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
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
    layers = _layers(lines[0]) if lines else ()
    text = output.decode("utf-8", "replace")
    if status is None:
        return Outcome(False, f"timed out after {seconds:g} s", text, layers)
    verdicts = [line for line in lines if line.get("nonce") == nonce]
    if verdicts:
        return Outcome(verdicts[-1].get("passed") is True, _one_line(verdicts[-1].get("note")), text, layers)
    return Outcome(False, _why_silent(status), text, layers)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line of the report, which the program may have written; None for anything else"""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _layers(line: dict[str, Any]) -> tuple[str, ...]:
    names = line.get("layers")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _one_line(note: Any) -> str:
    """The note without line breaks and without characters that no file can hold; one that is no text is left
    out
    """
    if not isinstance(note, str):
        return "no reason was reported"
    return " ".join(note.encode("utf-8", "backslashreplace").decode("utf-8").split())[:NOTE_CHARACTERS]


def _why_silent(status: int) -> str:
    """Why a process ended without a verdict; 128 + a signal stands for that signal, as in a shell."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return "used more processor time than allowed"
    if number > 0:
        return f"killed by signal {number} ({_signal_name(number)})"
    return f"ended early with exit status {status}"


def _signal_name(number: int) -> str:
    return (signal.strsignal(number) if number < signal.NSIG else None) or "unknown"
