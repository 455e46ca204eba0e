"""The peers' command as far as a machine without torch runs it, and how their rows reach the benchmarks."""

import json
import sys
import zipfile

import pytest

from jddtree.benchmarks.kernels import peer_times as kernels_peers
from jddtree.benchmarks.peers import __main__ as peers
from jddtree.benchmarks.peers import library
from jddtree.benchmarks.step import __main__ as step
from jddtree.benchmarks.step.account import tables as step_table
from jddtree.errors import UserError


@pytest.fixture
def wheel(tmp_path):
    """A wheel with the files that are taken out of vLLM's, and one that is not."""
    path = tmp_path / "vllm.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*library.PARTS, "vllm/engine.py"):
            archive.writestr(name, "")
        archive.writestr(
            "vllm-0.23.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.23.0\n"
        )
    return path


def test_a_wheel_becomes_a_folder(wheel, tmp_path, monkeypatch):
    """The parts alone, with empty packages; the folder is named by the option or by PEERS, and knows its
    version.
    """
    assert peers.main(["unpack", str(wheel), str(tmp_path / "parts")]) == 0
    folder = library.folder_of(tmp_path / "parts")
    assert (
        not (folder / "vllm" / "engine.py").exists() and (folder / "vllm" / "__init__.py").read_text() == ""
    )
    assert library._version(folder) == "0.23.0"
    monkeypatch.setenv("PEERS", str(folder))
    assert library.folder_of(None) == folder


def test_a_machine_without_torch_is_told_what_to_install(wheel, tmp_path, monkeypatch, capsys):
    """One line; nothing is measured."""
    library.unpack(wheel, tmp_path / "parts")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.main(["kernels", "--folder", str(tmp_path / "parts")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert (
        captured.err.startswith("error: the peers need torch")
        and "pip install 'torch==2.11.*'" in captured.err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernels"], "no folder of vLLM's kernels: give --folder or set PEERS"),
        (["step", "--folder", "nowhere"], "nowhere has no vllm/_moe_C.abi3.so"),
        (["step", "--context", "100"], "--context is 100, but FlashMLA reads pages of 64"),
        (["step", "--context", "64", "--tokens", "65"], "--context is 64, but must hold the 65 rows"),
        (["kernels", "--tokens", "0"], "--tokens is '0'"),
        (["kernels", "--routing", "nowhere.json"], "--routing is 'nowhere.json'"),
        (["kernels", "--context", "2048,2000"], "--context is 2000"),
        (["step", "--output", "."], "--output . is a folder"),
        (["unpack", "nowhere.whl", "parts"], "nowhere.whl cannot be unpacked into parts"),
    ],
)
def test_arguments_that_cannot_be_used(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PEERS", raising=False)
    assert peers.main(words) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1


def test_rows_of_a_results_file_reach_both_benchmarks(tmp_path):
    """As of the peers' command, or a bare list; a row without a routing is one of uniform routing."""
    timed = {"kernel": "expert_layer", "tokens": 9, "peer": "Marlin", "time_us": 90.0}
    passed = {"stage": "verify", "tokens": 9, "context": 4096, "peer": "composed", "time_ms": 16.0}
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"rows": [timed]}))
    assert kernels_peers.read(path) == [timed]
    path.write_text(json.dumps([passed]))
    assert step._peers(path) == [passed | {"routing": "uniform"}]
    path.write_text(json.dumps([timed]))
    with pytest.raises(UserError, match="has a row without 'stage'"):
        step._peers(path)


@pytest.mark.parametrize("text", ["", "{}", '{"rows": 1}', "[1]", "[" * 100_000])
def test_a_file_that_holds_no_rows_is_refused(text, tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"--peers {path}"):
        kernels_peers.rows_of(path, "step")


def test_a_folder_is_measured_in_a_process_of_its_own(wheel, tmp_path, capfd):
    """Which ends in its own line when it cannot; the benchmark says which option it was."""
    library.unpack(wheel, tmp_path / "parts")
    with pytest.raises(UserError, match="measuring ended with 1"):
        kernels_peers.rows_of(tmp_path, "step")
    assert f"error: {tmp_path} has no vllm" in capfd.readouterr().err


def test_a_table_shows_the_peer_beside_the_pass_of_its_size():
    size = {"stage": "verify", "tokens": 9, "context": 4096, "routing": "uniform"}
    shown = [size | {"time_ms": 8.0}, size | {"routing": "zipf", "time_ms": 7.0}]
    peer = size | {"peer": "composed", "experts": 66.0, "time_ms": 16.0}
    _, _, first, second = step_table.stages(shown, [peer]).splitlines()
    assert "16.00" in first and "16.00" not in second
    assert "composed" in step_table.peers([peer]).splitlines()[2]
