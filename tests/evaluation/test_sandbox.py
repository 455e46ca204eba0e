"""The sandbox against each thing that generated code may do: a clear note, in bounded time, and nothing left
behind.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from jddtree.evaluation.sandbox import execution as sandbox
from jddtree.evaluation.sandbox.execution import Outcome, run_code
from jddtree.evaluation.tasks.coding import MBPP


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
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    "
        "x: int\nA(1)",
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
    assert (
        "File too large"
        in refused("with open('a', 'wb') as f:\n    for _ in range(99): f.write(bytes(2**20))").note
    )


def test_forks_end_with_the_program(layers: tuple[str, ...]) -> None:
    outcome = refused("import os\nfor _ in range(20): os.fork()\nwhile True: pass", seconds=0.7)
    assert outcome.note.startswith(
        "PermissionError" if "call filter" in layers else ("timed out", "BlockingIOError")
    )


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
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.symlink('x', {str(kept)!r} + '2')",
    ):
        assert "PermissionError" in refused(source).note
    assert "OSError" in refused(f"import os\nos.link({str(kept)!r}, 'link')").note
    assert kept.read_text() == "before" and os.listdir(tmp_path) == ["kept"]


def test_the_network_is_out_of_reach(layers: tuple[str, ...]) -> None:
    if not {"call filter", "network namespace"} & set(layers):
        pytest.skip("no layer against network use here")
    connect = "import socket\nsocket.create_connection(('127.0.0.1', {}), 1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused(connect.format(server.getsockname()[1]))


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    names = run_code(
        "import os\nprint(sorted(os.environ), os.environ['HOME'] == os.getcwd(), os.listdir('.'))"
    ).output
    assert "SECRET_TOKEN" not in names and names.rstrip().endswith("True []")


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    run_code("import os\nos.mkdir('a')\nopen('a/b', 'w')\nos.chmod('a', 0)")
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert os.listdir(tmp_path) == [] and before == after


def test_a_forged_report_does_not_pass() -> None:
    forge = (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, "
        'b\'{"nonce": "", "passed": true}\\n[1]\\nx\\n\')\n'
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
    """ProcessLookupError as soon as the process has ended; an orphan stays for as long as its new parent
    takes.
    """
    for _ in range(200):
        os.kill(pid, 0)
        time.sleep(0.01)


# What a program may do to another process; each line is tried by itself.
ATTACKS = """
os.kill(victim, 10)
call(200, victim, 10)
call(234, victim, victim, 10)
call(129, victim, 10, info)
call(297, victim, victim, 10, info)
signal.pidfd_send_signal(os.pidfd_open(victim), 10)
signal.pidfd_send_signal(os.open(f"/proc/{victim}", os.O_RDONLY), 10)
fcntl.fcntl(pipe, 8, victim); arm(pipe)
fcntl.fcntl(pipe, 15, struct.pack("ii", 1, victim)); arm(pipe)
fcntl.ioctl(ends[0], 0x8901, struct.pack("i", victim)); arm(ends[0].fileno())
fcntl.ioctl(ends[0], 0x8902, struct.pack("i", victim)); arm(ends[0].fileno())
resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1))
resource.prlimit(victim, resource.RLIMIT_NOFILE, (7, 7))
os.sched_setaffinity(victim, {0})
os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))
call(142, victim, info)
call(314, victim, struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0), 0)
os.setpriority(os.PRIO_PROCESS, victim, 19)
call(251, 1, victim, 3 << 13)
call(101, 16, victim, 0, 0)
call(310, victim, vector, 1, vector, 1, 0)
call(312, victim, victim, 0, 0, 0)
call(256, victim, 8, info, info)
call(274, victim, info, info)
"""
ATTACKER = """
import ctypes, fcntl, os, resource, signal, socket, struct
victim, libc, info = {victim}, ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(128)
vector = struct.pack("PP", ctypes.addressof(info), 8)
pipe, other = os.pipe()
ends = socket.socketpair()
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def arm(file):
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(other, b"x"), ends[1].send(b"x")
for line in {attacks!r}.strip().splitlines():
    try:
        exec(line)
        print(line)
    except OSError:
        pass
"""


@pytest.fixture
def victim() -> Iterator[int]:
    """The number of a process that does nothing; signal 10 ends it."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def state(process: int) -> tuple:
    """What others could change of a process; ProcessLookupError once it has ended."""
    (ended, _) = os.waitpid(process, os.WNOHANG)
    if ended:
        raise ProcessLookupError
    return (
        resource.prlimit(process, resource.RLIMIT_CPU),
        resource.prlimit(process, resource.RLIMIT_NOFILE),
        os.sched_getaffinity(process),
        os.sched_getscheduler(process),
        os.getpriority(os.PRIO_PROCESS, process),
    )


def guard_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *kept: str) -> None:
    """Take a copy of the guard that applies these layers only."""
    text = sandbox.GUARD.read_text()
    for layer, call, nothing in (
        ("process namespace", "layers = enter_namespaces(libc)", "layers = []"),
        ("signal fence", "layers += fence(libc)", "pass"),
        ("call filter", "if filter_calls(libc)", "if False"),
    ):
        assert call in text
        text = text if layer in kept else text.replace(call, nothing)
    (folder / "guard.py").write_text(text)
    (folder / "call_filter.py").write_text(sandbox.GUARD.with_name("call_filter.py").read_text())
    monkeypatch.setattr(sandbox, "GUARD", folder / "guard.py")


@pytest.mark.parametrize("kept", ["process namespace", "call filter", "all"])
def test_other_processes_stay_as_they_are(
    kept: str, layers: tuple[str, ...], victim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of the two layers alone refuses every call that reaches another process, and so do all
    together.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64" or (kept not in layers and kept != "all"):
        pytest.skip("the layer is not here, or calls have other numbers")
    if kept != "all":
        guard_with(monkeypatch, tmp_path, kept)
    before = state(victim)
    outcome = run_code(ATTACKER.format(victim=victim, attacks=ATTACKS))
    assert outcome == Outcome(True, "", "", outcome.layers) and kept in (*outcome.layers, "all")
    assert state(victim) == before


def test_no_signal_passes_the_fence(
    layers: tuple[str, ...], victim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "signal fence" not in layers:
        pytest.skip("no Landlock with signals here")
    guard_with(monkeypatch, tmp_path, "signal fence")
    signals = "\n".join(line for line in ATTACKS.splitlines() if "arm(" in line or "10" in line)
    outcome = run_code(ATTACKER.format(victim=victim, attacks=signals))
    assert outcome.layers == ("write fence", "signal fence") and outcome.passed
    state(victim)


def test_shared_memory_is_refused_and_none_stays(layers: tuple[str, ...]) -> None:
    """By the filter; without it the namespace takes it along."""
    if not {"call filter", "process namespace"} & set(layers) or os.uname().machine != "x86_64":
        pytest.skip("no layer against shared memory here")
    table = Path("/proc/sysvipc/shm")
    before = table.read_text()
    assert (
        "OSError"
        in refused("import ctypes\nif ctypes.CDLL(None).shmget(0, 2**20, 0o1600) < 0: raise OSError").note
    )
    assert table.read_text() == before


def test_shared_memory_ends_with_the_namespace(
    layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "process namespace" not in layers:
        pytest.skip("no namespaces here")
    guard_with(monkeypatch, tmp_path, "process namespace")
    before = Path("/proc/sysvipc/shm").read_text()
    assert run_code("import ctypes\nassert ctypes.CDLL(None).shmget(0, 2**20, 0o1600) >= 0").passed
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_what_leaves_the_group_ends_with_the_namespace(
    layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the call filter a program can start a session of its own; its pipe closes when it dies."""
    if "process namespace" not in layers:
        pytest.skip("no namespaces here")
    guard_with(monkeypatch, tmp_path, "process namespace")
    alive = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    open({!r}, 'w').close()\n    "
        "time.sleep({})\n"
    )
    mark, seconds = tmp_path / "mark", f"8{os.getpid()}.25"
    assert run_code(
        alive.format(str(mark), seconds) + f"    os._exit(0)\nwhile not os.path.exists({str(mark)!r}): pass"
    ).passed
    assert mark.exists() and b"jddtree-code-" not in _working_folders()


def _working_folders() -> bytes:
    """The working folders of all processes, those of removed folders included."""
    found = []
    for _ in range(200):  # the kernel takes a moment to end a namespace
        found = [_link(place) for place in Path("/proc").glob("[0-9]*/cwd")]
        if not any("jddtree-code-" in folder for folder in found):
            break
        time.sleep(0.01)
    return " ".join(found).encode("utf-8", "surrogateescape")


def _link(place: Path) -> str:
    try:
        return os.readlink(place)
    except OSError:
        return ""


def test_nothing_of_the_program_runs_after_the_verdict() -> None:
    """Neither exit handlers nor threads that would wait for ever."""
    outcome = run_code(
        "import atexit, threading, time\natexit.register(print, 'late', flush=True)\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\nprint('end')",
        seconds=20.0,
    )
    assert outcome.passed and outcome.output == "end\n"


def test_a_program_of_deep_folders_is_an_answer_like_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its tests fail or pass, nothing raises, and nothing stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (example,) = MBPP().examples(1)
    deep = "import os\nfor _ in range(1100):\n    os.mkdir('level')\n    os.chdir('level')\n"
    answer = f"```python\n{deep}{example.reference['code']}\n```"
    score = MBPP(seconds=60.0).score(example, answer)
    left = os.listdir(tmp_path)
    subprocess.run(["rm", "-rf", *(tmp_path / name for name in left)], check=True)  # pytest could not
    assert score.metrics == {"pass@1": 1.0} and left == []


NONCE = "0123456789abcdef"
VERDICT = {"nonce": NONCE, "passed": True, "note": ""}


@pytest.mark.parametrize(
    "report, passed, note",
    [
        (b"[" * 6000, False, "ended early with exit status 0"),
        (b'{"a":' * 3000, False, "ended early with exit status 0"),
        (b'{"nonce": ' + b"9" * 9000 + b"}", False, "ended early with exit status 0"),
        (b"\xff\xfe\x00[\n\x00\x00\xfe\xff\n\xef\xbb\xbf{}", False, "ended early with exit status 0"),
        (b'{"layers": 5}\n{"layers": [[1], null, "a"]}', False, "ended early with exit status 0"),
        (b'{"layers": null}\n' + json.dumps({"nonce": NONCE}).encode(), False, "no reason was reported"),
        (json.dumps(VERDICT | {"passed": 1}).encode(), False, ""),
        (json.dumps(VERDICT | {"note": [[[]]]}).encode(), True, "no reason was reported"),
        (json.dumps(VERDICT | {"note": "\ud800\n" * 9000}).encode(), True, ("\\ud800 " * 9000)[:400]),
        (json.dumps(VERDICT | {"note": 1e999}).encode(), True, "no reason was reported"),
        (b"[" * 6000 + b"\n" + json.dumps(VERDICT).encode(), True, ""),
    ],
)
def test_no_report_is_too_odd(report: bytes, passed: bool, note: str) -> None:
    """The pipe is the program's as well: what it writes there never raises."""
    outcome = sandbox._outcome(0, b"\xff\x00", report, NONCE, 1.0)
    assert (outcome.passed, outcome.note, outcome.output) == (passed, note, "\ufffd\x00")


def test_a_flooded_report_is_no_verdict() -> None:
    """What the program writes there first is kept, so that the verdict behind it is lost."""
    flood = (
        "import os\nfor _ in range(9):\n    for fd in range(3, 64):\n        try: os.write(fd, b'[' "
        "* 60000)\n"
    )
    assert "exit status 0" in refused(flood + "        except OSError: pass").note


@pytest.mark.parametrize(
    "status, note",
    [
        (-9, "killed by signal 9 (Killed)"),
        (137, "killed by signal 9 (Killed)"),
        (-24, "used more processor time than allowed"),
        (152, "used more processor time than allowed"),
        (255, "killed by signal 127 (unknown)"),
        (3, "ended early with exit status 3"),
    ],
)
def test_the_end_of_a_program_is_said(status: int, note: str) -> None:
    assert sandbox._outcome(status, b"", b"", NONCE, 1.0).note == note


NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}
AS_NOBODY = """
import os, tempfile
from jddtree.evaluation.sandbox.execution import run_code
tempfile.tempdir = os.getcwd()
made = run_code("import os; os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0)")
killer = run_code("import os; os.kill(os.getppid(), 9)")
print(made, killer.note, os.listdir("."), sep="|")
"""


def python_of_nobody() -> str | None:
    """An interpreter that the user nobody may start and that can import the sandbox; homes are often
    closed.
    """
    for path in (sys.executable, "/usr/bin/python3"):
        command = [path, "-B", "-c", "import jddtree.evaluation.sandbox.execution"]
        options = {"env": {"PYTHONPATH": str(ROOT)}, "stderr": subprocess.DEVNULL, "cwd": "/"}
        try:
            if subprocess.run(command, **options, **NOBODY).returncode == 0:
                return path
        except OSError:
            pass
    return None


def test_an_ordinary_user_has_the_same_layers(layers: tuple[str, ...]) -> None:
    """Root runs it as nobody: the program passes, is confined, and leaves nothing."""
    if os.getuid() != 0 or (python := python_of_nobody()) is None:
        pytest.skip("this is an ordinary user, or nobody can start no interpreter")
    folder = Path(tempfile.mkdtemp(prefix="jddtree-nobody-"))
    os.chown(folder, NOBODY["user"], NOBODY["group"])
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [python, "-c", AS_NOBODY], cwd=folder, env=environment, capture_output=True, text=True, **NOBODY
    )
    folder.rmdir()
    assert result.stderr == ""
    made, note, left = result.stdout.strip().split("|")
    assert made == repr(Outcome(True, "", "", layers)) and left == "[]"
    assert "PermissionError" in note or "call filter" not in layers
