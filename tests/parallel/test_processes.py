"""Two processes of four CPU devices each: one answer, printed once, one evaluation, and one failure that
ends both.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
from conftest import COMPILE_FLAGS, PATIENCE, ROOT


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_both(command, *arguments, second=()):
    """Start both processes of `run.py COMMAND --json`; returns (code, stdout, stderr) of each."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {COMPILE_FLAGS} {PATIENCE}",
        "JAX_PLATFORMS": "cpu",
    }
    port, running = free_port(), []
    for index in range(2):
        call = [sys.executable, str(ROOT / "run.py"), command, "--json", "--no-compile-cache", *arguments]
        call += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", str(index)]
        call += second if index else []
        running.append(
            subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=240) for process in running]
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


@pytest.mark.parametrize("layout, budget", [("tensor", "7"), ("expert", "auto")])
def test_two_processes_give_one_answer(layout, budget):
    """With node counts by measured costs too: both processes go by the first one's times."""
    small = ["--capacity", "8", "--max-context", "256", "--rounds-per-dispatch", "2"]
    options = ["--budget", budget, *small, "--expert-layout", layout]
    first, second = run_both("generate", "-p", "def is_empty(self):", *options)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert json.loads(first[1])["text"] == "def is_empty(self):\n    return not self.is_empty()"
    assert second[1] == ""


def test_two_processes_score_as_one(tmp_path):
    """The first one writes; a run that it finds unfinished goes on in both, without what is there."""
    given, out = tmp_path / "mine.jsonl", tmp_path / "out"
    given.write_text("".join(json.dumps({"prompt": f"def f{n}(", "max_tokens": 6}) + "\n" for n in range(3)))
    options = (
        "--tasks",
        str(given),
        "--batch",
        "2",
        "--budget",
        "7",
        "--max-context",
        "64",
        "--output",
        str(out),
    )
    first, second = run_both("eval", *options)
    assert first[0] == second[0] == 0, first[2] + second[2]
    (results,), (samples,) = out.glob("results_*"), out.glob("samples_*")
    whole = samples.read_text().splitlines()
    assert len(whole) == 4 and second[1] == ""
    results.unlink()
    samples.write_text("".join(line + "\n" for line in (whole[0], whole[2])))
    first, second = run_both("eval", *options)
    assert first[0] == second[0] == 0, first[2] + second[2]
    again = samples.read_text().splitlines()
    plain = lambda line: {
        key: value for key, value in json.loads(line).items() if key not in ("seconds", "decode_seconds")
    }
    assert list(map(plain, again)) == list(map(plain, whole)) and again[2] == whole[2]


def test_one_failure_ends_both_with_its_message():
    first, second = run_both("generate", "-p", "x", second=["--target", "nowhere"])
    assert first[0] == second[0] == 1
    assert "process 1 failed: nowhere/config.json does not exist" in first[2]
    assert "nowhere/config.json does not exist" in second[2]


def test_half_a_coordinator_is_refused():
    call = [sys.executable, str(ROOT / "run.py"), "generate", "--processes", "2"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "--coordinator HOST:PORT" in done.stderr
