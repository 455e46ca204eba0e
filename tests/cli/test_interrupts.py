"""Ctrl-C at any moment: exit code 130, one line, soon."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from conftest import COMPILE_FLAGS, ROOT

from jddtree.cli.ending import guard, interrupts

PATIENCE = 60  # seconds for a start and an end on a busy machine

# Tests may run where SIGINT is ignored, as under nohup, and what they start inherits that.
HEARD = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
RUN = """
sys.argv[0] = "run.py"
import runpy
runpy.run_path("run.py", run_name="__main__")
"""
AT_IMPORT = (
    HEARD
    + """
moment = sys.argv.pop(1)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
    + RUN
)
KEEPING = (
    HEARD
    + """
import ctypes
from jddtree.cli.ending import interrupts
interrupts.install()
interrupts.keep()
"""
)


@pytest.fixture
def environment():
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILE_FLAGS}


def started(environment, *words) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], env=environment, cwd=ROOT, **pipes)


def test_while_modules_are_imported(environment) -> None:
    """Pure Python, a module of C++ and one of ours; all at once, as most of it is waiting for the disk."""
    moments = ["typer.main", "ml_dtypes", "jaxlib._jax", "jddtree.parallel.processes"]
    running = [started(environment, "-c", AT_IMPORT, moment, "generate", "-p", "x") for moment in moments]
    for moment, process in zip(moments, running, strict=True):
        answer, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, answer, errors) == (130, "", "interrupted\n"), moment


def test_while_loading_and_compiling(environment) -> None:
    """Nothing is compiled in the time between the last byte loaded and the signal."""
    options = ["--no-compile-cache", "--max-tokens", "4", "--budget", "32", "-p", "x"]
    with started(environment, "-c", HEARD + RUN, "generate", *options) as process:
        shown = ""
        while "Loading drafter: 100%" not in shown:
            shown += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        answer, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, answer) == (130, "") and errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


SWALLOWED = (
    KEEPING
    + """
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    assert interrupts.asked()
ctypes.CDLL(None).sleep(60)
"""
)
BLOCKED = (
    KEEPING
    + """
import threading
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
mutex = ctypes.create_string_buffer(128)
for _ in range(2):  # the second call waits for ever
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
)


def test_a_lost_exception_and_a_main_thread_in_c_do_not_save_the_process(environment) -> None:
    """The second chance ends it: the exception was swallowed, or Python's handler never ran."""
    for process in [started(environment, "-c", script) for script in (SWALLOWED, BLOCKED)]:
        answer, errors = process.communicate(timeout=30)
        assert (process.returncode, answer, errors) == (130, "", "interrupted\n")


def test_an_exception_that_ctrl_c_caused_is_none_of_its_own(capfd) -> None:
    """Modules of C++ that are being imported turn a KeyboardInterrupt into an ImportError."""
    handler = interrupts.Interrupts()
    handler.keeps = True
    before = signal.signal(signal.SIGINT, handler)

    def command() -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise ImportError("initializing the extension")

    try:
        assert guard.guarded(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "interrupted\n"


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.install()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not interrupts.asked()
    finally:
        signal.signal(signal.SIGINT, before)


AT_EXIT = (
    HEARD
    + """
import atexit
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
    + RUN
)


@pytest.mark.parametrize("words", [("--help",), ("inspect", "jddtree/assets/micro/target")], ids=str)
def test_when_the_work_is_done_its_code_stands(environment, words) -> None:
    """While Python cleans up, where the signal would end the process without a line."""
    process = started(environment, "-c", AT_EXIT, *words)
    text, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in errors) == (0, False)
    assert text and "interrupted" not in errors


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "--tasks", "gsm8k", "--output"),
        ("bench", "generate", "--output"),
        ("convert", "--target", "jddtree/assets/micro/target", "--out"),
    ],
    ids=lambda words: words[0],
)
def test_other_commands_end_so_too(environment, words, tmp_path) -> None:
    """Before they begin to work: their modules are imported, then the signal comes."""
    process = started(environment, "-c", AT_IMPORT, "numpy", *words, str(tmp_path / "out"))
    text, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, text, errors) == (130, "", "interrupted\n")
