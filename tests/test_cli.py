"""The command line as a user meets it: exit codes, one-line errors, streams and the JSON object."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import COMPILE_FLAGS, ROOT, micro_drafter, micro_target

from jddtree.cli.main import app, guarded


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """One CPU device; programs are compiled once, into the cache of this run of the tests."""
    return os.environ | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": COMPILE_FLAGS,
    }


@pytest.fixture
def command(environment):
    """Run `run.py` with arguments in a process of its own."""

    def run(*arguments, **options):
        call = [sys.executable, str(ROOT / "run.py"), *map(str, arguments)]
        return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300, **options)

    return run


def error_of(capsys, *arguments):
    """Exit code and last line of stderr of a command run in this process."""
    code = guarded(lambda: app(list(map(str, arguments)), standalone_mode=False))
    lines = [
        line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if not line.startswith("Loading")
    ]
    return code, lines[-1] if lines else ""


def test_help_is_fast_and_does_not_import_jax():
    """--help lists the commands in under half a second."""
    code = (
        "import sys; from jddtree.cli.main import app, guarded\n"
        "guarded(lambda: app(['generate', '--help'], standalone_mode=False)); print('jax' in sys.modules)"
    )
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        times.append(time.perf_counter() - begun)
    assert "--budget" in done.stdout and done.stdout.rstrip().endswith("False")
    assert min(times) < 0.5


def test_usage_errors_exit_with_2(command):
    assert command("generate", "--method", "beam").returncode == 2
    assert command("dance").returncode == 2


def test_streams_answer_to_stdout_and_statistics_to_stderr(command):
    """Twice the same text; the second run finds its programs in the cache."""
    arguments = ("generate", "--max-tokens", 24, "--budget", 8)
    first, second = command(*arguments), command(*arguments)
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout and first.stdout.startswith("def main():\n")
    statistics = second.stderr.strip().splitlines()[-3:]
    assert [line.split(":")[0] for line in statistics] == ["Prompt", "Generation", "Speculation"]
    assert "compile" in statistics[1] and "tokens per round (bonus included)" in statistics[2]


def test_json_is_exactly_one_object(command):
    done = command("generate", "--json", "-p", "def is_empty(self):", "--budget", 8)
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert report["text"] == "def is_empty(self):\n    return not self.is_empty()"
    assert report["finish_reason"] == "stop" and report["token_ids"][-1] == 1026
    assert report["rounds"] == len(report["emitted_per_round"]) == len(report["nodes_per_round"])
    assert len(report["token_ids"]) == 1 + sum(report["emitted_per_round"])
    assert (report["method"], report["budget"]) == ("tree", 8)
    assert set(report["timings"]) == {"load_s", "compile_s", "prefill_s", "decode_s"}


@pytest.mark.parametrize(
    "arguments", [("--method", "ar"), ("--method", "ar", "--capacity", 16), ("--method", "dflash")]
)
def test_every_method_writes_the_same_text(command, arguments):
    """Plain decoding may also run in the shapes of a tree."""
    done = command("generate", "-q", "-p", "def is_empty(self):", *arguments)
    assert done.stdout == "def is_empty(self):\n    return not self.is_empty()\n", done.stderr


def test_prompt_from_standard_input(command):
    done = command("generate", "-q", "--budget", 8, "-p", "-", input="def is_empty(self):")
    assert done.stdout == "def is_empty(self):\n    return not self.is_empty()\n" and done.stderr == ""


def test_interrupt_prints_statistics_and_exits_with_130(environment):
    """What was written stays; Ctrl-C ends with 130 and the three lines."""
    # Tests may run where SIGINT is ignored, as under nohup, and what they start inherits that.
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    options = ["generate", "--max-tokens", "8000", "--ignore-eos", "--budget", "8"]
    call = [sys.executable, "-c", heard, sys.executable, str(ROOT / "run.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(call, env=environment, text=True, **pipes) as running:
        assert running.stdout.read(20)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in errors and errors.strip().splitlines()[-1].startswith("Speculation")


def test_closed_pipe_is_silent(environment):
    call = [
        sys.executable,
        str(ROOT / "run.py"),
        "generate",
        "-q",
        "--budget",
        "8",
        "--ignore-eos",
        "--max-tokens",
        "2000",
    ]
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.read(10)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--target", "nowhere"], ["nowhere/config.json", "does not exist"]),
        (["-p", "x", "--budget", 40, "--capacity", 40], ["budget is 40", "capacity of 40 rows", "raise --capacity"]),
        (["-p", "x", "--capacity", 4], ["capacity is 4", "block size 8", "raise --capacity"]),
        (["-p", "x", "--max-context", 8], ["the prompt is", "context holds 8", "raise --max-context"]),
        (["-p", "x", "--max-context", 10_000_000], ["10000000", "8192"]),
        (["-p", "x", "--max-tokens", 0], ["--max-tokens is 0", "must be 1"]),
        (["-p", "x", "--top-p", 0], ["--top-p is 0.0"]),
        (["-p", "x", "--temperature", -1], ["--temperature is -1.0"]),
        (["-p", "x", "--seed", -1], ["--seed is -1"]),
        (["-p", "x", "--top-k-cap", 0], ["--top-k-cap is 0"]),
        (["-p", "x", "--stop", ""], ["stop string 0 is ''"]),
        (["-p", "x", "--prompt-file", "y"], ["--prompt and --prompt-file", "one of them"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "cannot be read"]),
        (["--target", micro_target(), "-p", "x"], ["'tree' needs a drafter", "--draft DIR"]),
        (["--target", micro_target(), "--draft", micro_drafter()], ["no prompt was given", "--prompt"]),
        (["--target", micro_drafter(), "-p", "x"], ["DFlashDraftModel", "not known"]),
        (["--draft", micro_target(), "-p", "x"], ["KimiK25ForConditionalGeneration", "DFlash v1"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(capsys, arguments, words):
    """Each names the thing, the values and what to do, and exits with 1."""
    code, line = error_of(capsys, "generate", *arguments)
    assert code == 1 and line.startswith("error: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "flag, content, words",
    [
        ("--prompt-ids", "[1, true]", ["list of integers"]),
        ("--prompt-ids", "[1,", ["is not JSON"]),
        ("--prompt-ids", "[]", ["prompt is empty"]),
        ("--prompt-ids", "[1, 1280]", ["token id 1280", "0 to 1279"]),
        ("--messages", "{}", ["messages"]),
        ("--messages", '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]', ["image"]),
    ],
)
def test_bad_files_are_one_line(capsys, tmp_path, flag, content, words):
    path = tmp_path / "given.json"
    path.write_text(content)
    code, line = error_of(capsys, "generate", flag, path)
    assert code == 1 and all(word in line for word in words), line


def test_drafter_for_another_target_is_refused(capsys, tmp_path):
    """The message holds both values."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    for file in micro_drafter().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_target_layers": 61}))
    code, line = error_of(capsys, "generate", "-p", "x", "--draft", folder)
    assert code == 1 and "another target" in line and "61" in line and "has 6" in line


def test_a_store_writes_the_same_text(command, tmp_path):
    """Converted, checked and loaded: what the Hugging Face folders give; a damaged file is named."""
    store = tmp_path / "store"
    made = command("convert", "-q", "--target", micro_target(), "--draft", micro_drafter(), "--out", store)
    assert made.returncode == 0, made.stderr
    arguments = ("generate", "-q", "--budget", 8, "--no-thinking", "-p", "def is_empty(self):", "--target", store)
    assert command(*arguments, "--check").stdout == "def is_empty(self):\n    return not self.is_empty()\n"
    damaged = store / "target" / "norm.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    refused = command(*arguments, "--check")
    assert refused.returncode == 1 and "target/norm.bin" in refused.stderr
