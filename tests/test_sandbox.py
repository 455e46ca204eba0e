"""The sandbox against each thing that generated code may do: a clear note, in bounded time, and nothing left behind."""

import os
import resource
import socket
import tempfile
import time
from pathlib import Path

import pytest

from jddtree.evaluation import sandbox
from jddtree.evaluation.sandbox import Outcome, run_code


@pytest.fixture(scope="module")
def layers() -> tuple[str, ...]:
    """The layers that hold on this machine."""
    return run_code("").layers


def refused(source: str, *, seconds: float = 5.0, **limits: int) -> Outcome:
    outcome = run_code(source, seconds=seconds, **limits)
    assert not outcome.passed and outcome.note and "\n" not in outcome.note
    return outcome


@pytest.mark.parametrize(
    "source",
    [
        "assert 1 + 1 == 2",
        "open('a.txt', 'w').write('x')\nassert open('a.txt').read() == 'x'",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(1)",
        "if __name__ == '__main__':\n    input()",
    ],
    ids=["assert", "file in its folder", "thread", "dataclass", "main block"],
)
def test_a_harmless_program_passes(source: str) -> None:
    outcome = run_code(source)
    assert outcome.passed and outcome.note == ""


@pytest.mark.parametrize(
    "source, note",
    [
        ("assert 1 + 1 == 3, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("\0", "null bytes"),
        ("raise ValueError('two\\nlines \\ud800')", "ValueError: two lines \\ud800"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
        ("import sys\nsys.exit(0)\nassert False", "SystemExit(0)"),
        ("import os\nos._exit(0)\nassert False", "exit status 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import ctypes\nctypes.string_at(0)", "signal 11"),
        ("import os, signal\nsignal.raise_signal(signal.SIGKILL)", "signal 9"),
    ],
)
def test_a_program_that_fails_or_leaves_early_does_not_pass(source: str, note: str) -> None:
    assert note in refused(source).note


def test_a_loop_is_stopped_in_time() -> None:
    """By its time on a processor, which other work on the machine does not lengthen."""
    used = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    before = used()
    assert refused("while True: pass", seconds=1.0).note == "timed out after 1 s"
    assert used() - before < 3.0


def test_a_loop_without_open_files_is_stopped() -> None:
    assert "timed out" in refused("import os\nos.closerange(0, 100)\nwhile True: pass", seconds=0.7).note


def test_ten_gigabytes_of_memory_are_refused() -> None:
    assert "MemoryError" in refused("x = bytearray(10 * 2**30)").note


def test_memory_that_grows_is_refused() -> None:
    grow = "x = []\nwhile True: x.append(bytearray(2**24))"
    assert "MemoryError" in refused(grow, memory_bytes=2**28).note


def test_a_gigabyte_of_output_is_not_kept() -> None:
    outcome = run_code("for _ in range(1024): print('x' * 2**20)", seconds=30.0)
    assert (outcome.passed or "timed out" in outcome.note) and len(outcome.output) == 4096


def test_endless_output_is_stopped() -> None:
    assert "timed out" in refused("while True: print('x' * 1000)", seconds=0.7).note


def test_a_large_file_is_refused() -> None:
    assert "File too large" in refused("with open('a', 'wb') as f:\n    for _ in range(99): f.write(bytes(2**20))").note


def test_forks_end_with_the_program(layers: tuple[str, ...]) -> None:
    outcome = refused("import os\nfor _ in range(20): os.fork()\nwhile True: pass", seconds=0.7)
    assert outcome.note.startswith("PermissionError" if "call filter" in layers else ("timed out", "BlockingIOError"))


def test_another_program_is_not_started(layers: tuple[str, ...]) -> None:
    if "call filter" not in layers:
        pytest.skip("no system call filter here")
    assert "PermissionError" in refused("import subprocess\nsubprocess.run(['true'])").note


def test_the_parent_is_not_killed(layers: tuple[str, ...]) -> None:
    if "call filter" not in layers:
        pytest.skip("no system call filter here: the test would kill its own process")
    assert "PermissionError" in refused("import os\nos.kill(os.getppid(), 9)").note


def test_files_outside_stay_as_they_are(layers: tuple[str, ...], tmp_path: Path) -> None:
    if "write fence" not in layers:
        pytest.skip("no Landlock here")
    kept = tmp_path / "kept"
    kept.write_text("before")
    for source in (
        f"open({str(kept)!r}, 'w')",
        f"import os\nos.remove({str(kept)!r})",
        f"open({str(kept)!r} + '2', 'w')",
    ):
        assert "PermissionError" in refused(source).note
    assert kept.read_text() == "before" and os.listdir(tmp_path) == ["kept"]


def test_the_network_is_out_of_reach(layers: tuple[str, ...]) -> None:
    if not {"call filter", "network namespace"} & set(layers):
        pytest.skip("no layer against network use here")
    connect = "import socket\nsocket.create_connection(('127.0.0.1', {}), 1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused(connect.format(server.getsockname()[1]))


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    names = run_code("import os\nprint(sorted(os.environ), os.environ['HOME'] == os.getcwd(), os.listdir('.'))").output
    assert "SECRET_TOKEN" not in names and names.rstrip().endswith("True []")


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    run_code("import os\nos.mkdir('a')\nopen('a/b', 'w')\nos.chmod('a', 0)")
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert os.listdir(tmp_path) == [] and before == after


def test_a_forged_report_does_not_pass() -> None:
    forge = (
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"nonce": "", "passed": true}\\n[1]\\nx\\n\')\n'
    )
    assert "exit status 0" in refused(forge + "    except OSError: pass\nos._exit(0)").note


def test_without_any_layer_the_limits_still_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "guard.py"
    bare.write_text(
        sandbox.GUARD.read_text().replace(
            "def confine() -> list[str]:", "def confine():\n    return []\n\ndef unused():"
        )
    )
    monkeypatch.setattr(sandbox, "GUARD", bare)
    assert run_code("assert True") == Outcome(True, "")
    outcome = refused("import os\nif pid := os.fork(): print(pid, flush=True)\nwhile True: pass", seconds=0.7)
    assert outcome.note == "timed out after 0.7 s" and outcome.layers == ()
    with pytest.raises(ProcessLookupError):
        _wait_gone(int(outcome.output))


def _wait_gone(pid: int) -> None:
    """ProcessLookupError as soon as the process has ended; an orphan stays for as long as its new parent takes."""
    for _ in range(200):
        os.kill(pid, 0)
        time.sleep(0.01)
