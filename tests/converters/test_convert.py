"""Conversion: resumed after every kind of end to the same bytes, refused where it must be, in bounded
memory.
"""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import copy_folder, edit_folder
from conftest import ROOT, micro_drafter, micro_target

from converters.storage import conversion
from converters.storage.convert import convert
from converters.storage.disk import write_at
from converters.storage.journal import Journal
from converters.storage.manifest import JOURNAL, MANIFEST, VERSION
from converters.storage.store import Store, is_store
from converters.synthetic import write_checkpoint, write_drafter
from jddtree.cli.convert import run
from jddtree.cli.options import ConvertOptions, QuietOptions
from jddtree.config import TargetConfig
from jddtree.errors import UserError

# Widths that divide by eight along every split axis.
WIDE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3}
WIDE |= {"n_routed_experts": 8, "num_experts_per_tok": 4}
WIDE_DRAFTER = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}

KILLED = """
import os, signal, sys
from pathlib import Path
from converters.storage import conversion
from converters.storage.convert import convert

conversion.SYNC_BYTES = 1 << 18
target, draft, out, *limits = sys.argv[1:]
for limit in map(int, limits):
    def end(stage, done, total):
        if done >= limit:
            os.kill(os.getpid(), signal.SIGKILL)
    if (child := os.fork()) == 0:
        convert(Path(target), Path(draft), Path(out), progress=end)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) and not (Path(out) / "manifest.json").exists()
"""

PEAK = """
import sys
from pathlib import Path
from converters.storage.convert import convert

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

before = memory("VmRSS")
convert(Path(sys.argv[1]), None, Path(sys.argv[2]))
print(memory("VmHWM") - before)
"""


def small_pair(folder: Path, **values) -> tuple[Path, Path]:
    """Folders of a random target and its drafter."""
    config = write_checkpoint(folder / "hf-target", WIDE | values, seed=1, vision=True)
    assert isinstance(config, TargetConfig)
    write_drafter(folder / "hf-drafter", config, WIDE_DRAFTER, seed=2)
    return folder / "hf-target", folder / "hf-drafter"


def same_trees(left: Path, right: Path) -> bool:
    """Equal names and bytes."""
    trees = [
        {path.relative_to(root): path for path in root.rglob("*") if path.is_file()} for root in (left, right)
    ]
    return trees[0].keys() == trees[1].keys() and all(
        trees[0][name].read_bytes() == trees[1][name].read_bytes() for name in trees[0]
    )


def in_process(code: str, *arguments) -> str:
    """What a fresh interpreter, without JAX, prints."""
    call = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(target, drafter) folders; tests do not change them."""
    return small_pair(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The store of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "store"
    convert(*source, out)
    return out


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Do not wait for the disk: no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def pair(tmp_path):
    """Folders that a test may change."""
    return small_pair(tmp_path)


def interrupt(source, out: Path, share: float, monkeypatch) -> None:
    """Convert until `share` of all bytes are done, then fail; the rest is left for later."""

    class Stop(Exception):
        pass

    def end(stage: str, done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "SYNC_BYTES", 1 << 18)
        with pytest.raises(Stop):
            convert(*source, out, progress=end)
    assert (out / JOURNAL).exists() and not (out / MANIFEST).exists()


def test_killed_again_and_again_the_store_is_the_same(source, whole, tmp_path: Path) -> None:
    size = convert(*source, tmp_path / "no", dry_run=True).plan.nbytes
    limits = sorted(random.Random(5).sample(range(size), 6))
    in_process(KILLED, *source, tmp_path / "store", *limits)
    outcome = convert(*source, tmp_path / "store")
    assert outcome.written + outcome.resumed == size and outcome.resumed > size / 4
    assert same_trees(whole, tmp_path / "store")


@pytest.mark.parametrize("seed", range(4))
def test_a_journal_cut_anywhere_resumes(source, whole, tmp_path: Path, monkeypatch, seed: int) -> None:
    interrupt(source, tmp_path / "store", 0.7, monkeypatch)
    journal = tmp_path / "store" / JOURNAL
    data = journal.read_bytes()
    journal.write_bytes(data[: random.Random(seed).randrange(len(data) + 1)] if seed else b"")
    convert(*source, tmp_path / "store")
    assert same_trees(whole, tmp_path / "store")


def test_what_the_journal_notes_but_the_disk_lost_is_written_again(
    source, whole, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "store"
    interrupt(source, out, 0.9, monkeypatch)
    files = sorted(path for path in out.rglob("*.bin") if path.stat().st_size)
    files[0].unlink()
    os.truncate(files[-1], files[-1].stat().st_size // 2)
    outcome = convert(*source, out)
    assert 0 < outcome.written < outcome.plan.nbytes and same_trees(whole, out)


def test_stopped_between_manifest_and_end(source, whole, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(*source, out)
    assert (out / MANIFEST).exists() and (out / JOURNAL).exists()
    assert convert(*source, out).written == 0
    assert same_trees(whole, out)


def test_a_full_disk_is_one_line_and_resumes(source, whole, tmp_path: Path, monkeypatch) -> None:
    out, room = tmp_path / "store", [3 << 20]

    def write(path, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_at(path, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_at", write)
        with pytest.raises(UserError) as caught:
            convert(*source, out)
    text = str(caught.value)
    assert f"the disk of {out} is too full: the store needs 0.0" in text and "\n" not in text
    assert "GB are free; make room and run the same command again, it resumes" in text
    assert (out / JOURNAL).exists() and not (out / MANIFEST).exists()
    outcome = convert(*source, out)
    assert outcome.resumed > 0 and same_trees(whole, out)


def test_a_file_size_limit_is_not_called_a_full_disk(source, whole, tmp_path: Path) -> None:
    """What `ulimit -f` refuses, by the limit itself; the same command resumes."""
    out = tmp_path / "store"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"ulimit -f.* the largest has 0\.\d+ GB; raise that limit.* it resumes"
        ) as caught:
            convert(*source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "full" not in str(caught.value) and str(out) in str(caught.value)
    convert(*source, out)
    assert same_trees(whole, out)


def test_an_error_while_syncing_notes_nothing(source, whole, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "store"

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "sync_file", full)
        with pytest.raises(UserError, match=r"is too full"):
            convert(*source, out)
    outcome = convert(*source, out)
    assert outcome.resumed == 0 and same_trees(whole, out)


def test_too_little_room_is_said_before_writing(source, tmp_path: Path, monkeypatch) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        UserError, match=r"needs 0\.\d+ GB, of which 0\.\d+ GB are not written yet, and 0\.001 GB are"
    ):
        convert(*source, tmp_path / "store")
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: os.utime(folder / "model-00002-of-000004.safetensors", (1, 1)),
            r"target/model-00002-of-000004\.safetensors \(written since\)",
        ),
        (
            lambda folder: (folder / "LICENSE").write_text("new"),
            r"target/LICENSE \(missing then, 3 bytes now\)",
        ),
        (
            lambda folder: (folder / "tiktoken.model").unlink(),
            r"target/tiktoken\.model \(\d+ bytes then, missing now\)",
        ),
    ],
)
def test_a_changed_source_is_refused(pair, tmp_path: Path, monkeypatch, change, message: str) -> None:
    interrupt(pair, tmp_path / "store", 0.5, monkeypatch)
    change(pair[0])
    with pytest.raises(
        UserError, match=rf"the source changed since the conversion into .* began: {message}; put back"
    ):
        convert(*pair, tmp_path / "store")
    assert convert(*pair, tmp_path / "store", force=True).resumed == 0


def test_another_set_of_parts_is_refused(pair, tmp_path: Path, monkeypatch) -> None:
    interrupt(pair, tmp_path / "store", 0.5, monkeypatch)
    with pytest.raises(UserError, match=r"began: drafter \(given then\); put back"):
        convert(pair[0], None, tmp_path / "store")


def test_a_source_that_changes_meanwhile_is_refused(pair, tmp_path: Path) -> None:
    def touch(stage: str, done: int, total: int) -> None:
        os.utime(pair[0] / "config.json", (1, 1))

    with pytest.raises(UserError, match=r"hf-target changed while it was converted; put back what it was"):
        convert(*pair, tmp_path / "store", progress=touch)
    assert not (tmp_path / "store" / MANIFEST).exists()


def test_dry_run_writes_nothing_and_plans_everything(source, whole, tmp_path: Path) -> None:
    plan = convert(*source, tmp_path / "store", dry_run=True).plan
    assert not (tmp_path / "store").exists()
    assert plan.nbytes == sum(path.stat().st_size for path in whole.rglob("*.bin"))
    for part in plan.parts:
        assert dict(part.sizes) == {
            str(path.relative_to(whole / part.name)): path.stat().st_size
            for path in (whole / part.name).rglob("*.bin")
        }
    assert [part.faults for part in plan.parts] == [(), ()]


def test_dry_run_lists_missing_and_extra_tensors(tmp_path: Path, capsys) -> None:
    def spoil(tensors) -> None:
        tensors["language_model.model.extra.weight"] = tensors.pop("language_model.model.norm.weight")

    folder = edit_folder(copy_folder(micro_target(), tmp_path), spoil)
    with pytest.raises(UserError, match=r"are not those that its config\.json needs: 1 tensor missing: "):
        run(ConvertOptions(folder, tmp_path / "store", micro_drafter(), dry_run=True), QuietOptions())
    text = capsys.readouterr().out
    assert "  1 tensor missing: language_model.model.norm.weight\n" in text
    assert "  1 tensor unexpected: language_model.model.extra.weight\n" in text
    with pytest.raises(UserError, match=r"1 tensor missing"):
        convert(folder, None, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_contradicting_shape_is_refused(tmp_path: Path) -> None:
    def swap(tensors) -> None:
        name = "language_model.model.layers.2.mlp.experts.5.down_proj.weight_shape"
        tensors[name] = tensors[name][::-1]

    folder = edit_folder(copy_folder(micro_target(), tmp_path), swap)
    with pytest.raises(
        UserError, match=r"1 tensor whose value contradicts the packed weights: .*5\.down_proj"
    ):
        convert(folder, None, tmp_path / "store")


def test_a_complete_store_is_kept(source, whole) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(
        UserError, match=r"is a complete store; check it with --verify, or make it again with --force"
    ):
        convert(*source, whole)
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_force_starts_over(source, whole, tmp_path: Path) -> None:
    convert(*small_pair(tmp_path, num_hidden_layers=4), tmp_path / "store")
    assert not same_trees(whole, tmp_path / "store")
    outcome = convert(*source, tmp_path / "store", force=True)
    assert outcome.resumed == 0 and same_trees(whole, tmp_path / "store")


def test_a_forced_conversion_that_was_killed_is_no_store(source, whole, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def end(stage: str, done: int, total: int) -> None:
        if done >= total / 2:
            raise Stop

    out = Path(shutil.copytree(whole, tmp_path / "store"))
    with pytest.raises(Stop):
        convert(*source, out, progress=end, force=True)
    assert is_store(out) and not (out / MANIFEST).exists()
    with pytest.raises(
        UserError, match=r"is an unfinished conversion; run the same convert command again, it resumes"
    ):
        Store(out)
    convert(*source, out)
    assert same_trees(whole, out)


SOURCE = {"files": {"config.json": 7}, "digest": "0", "changed": {"config.json": 1}}
BROKEN = ["[3]", "[true, 1]", "[-1, 1]", "[0, 1.0]", "[0, -1]", f"[0, {1 << 32}]", "{}", "null", '"0"', "7"]
BROKEN += ["[" * 100_000, "[0, NaN]", "[0, Infinity]", f"[0, {'9' * 5000}]", "\xff", "[0, 1, 1"]


@pytest.mark.parametrize("line", BROKEN)
def test_a_journal_ends_at_a_line_that_says_something_else(tmp_path: Path, line: str) -> None:
    journal = Journal(tmp_path)
    journal.begin({"parts": {"target": SOURCE}})
    journal.add({5: (1, 2)})
    journal.close()
    sound = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(sound + line.encode("latin-1") + b"\n[6, 1]\n")
    again = Journal(tmp_path)
    again.close()
    assert again.header == {"parts": {"target": SOURCE}} and again.done == {5: (1, 2)}
    assert (tmp_path / JOURNAL).read_bytes() == sound


@pytest.mark.parametrize(
    "identity",
    [
        {},
        5,
        [],
        {"parts": {"target": 1}},
        {"parts": {"target": SOURCE | {"digest": 1}}},
        {"parts": {"target": SOURCE | {"files": {"a": "b"}}}},
    ],
)
def test_a_journal_without_an_identity_starts_over(tmp_path: Path, identity) -> None:
    lines = json.dumps({"version": VERSION, "identity": identity}), "[0, 1]"
    (tmp_path / JOURNAL).write_text("\n".join(lines) + "\n")
    journal = Journal(tmp_path)
    journal.close()
    assert journal.header is None and journal.done == {} and (tmp_path / JOURNAL).read_bytes() == b""


def test_blocks_that_the_plan_does_not_have_are_written_again(
    source, whole, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "store"
    interrupt(source, out, 0.5, monkeypatch)
    with open(out / JOURNAL, "a") as journal:
        journal.write("[99999999, 1]\n[0, 1, 2, 3, 4, 5, 6]\n")
    convert(*source, out)
    assert same_trees(whole, out)


def test_verify_compares_with_the_source(source, whole, tmp_path: Path) -> None:
    stages = set()
    outcome = convert(*source, tmp_path / "store", verify=True, progress=lambda *call: stages.add(call[0]))
    assert outcome.compared is not None and outcome.compared > 60 and outcome.written
    assert stages == {"Converting", "Verifying"}
    outcome = convert(*source, tmp_path / "store", verify=True)
    assert outcome.compared is not None and outcome.written == 0 and same_trees(whole, tmp_path / "store")


def test_verify_finds_a_flipped_byte(pair, tmp_path: Path) -> None:
    out = tmp_path / "store"
    convert(*pair, out)
    path = out / "target" / "experts.down" / "001.bin"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"1 damaged file: target/experts\.down/001\.bin \(CRC-32"):
        convert(*pair, out, verify=True)
    values = json.loads((out / MANIFEST).read_text())
    values["parts"]["target"]["files"]["experts.down/001.bin"]["crc32"] = f"{zlib.crc32(data):08x}"
    (out / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"differs from its source in target/experts\.down piece 1 rows 7 to 7"
    ):
        convert(*pair, out, verify=True)


def test_verify_with_another_source(pair, whole) -> None:
    config = pair[0] / "config.json"
    config.write_text(
        config.read_text().replace('"transformers_version": "4.56.2"', '"transformers_version": "4.56.3"')
    )
    with pytest.raises(
        UserError, match=r"was made from another source: target/headers or small files \(of the same"
    ):
        convert(*pair, whole, verify=True)


def test_folders_that_must_not_be_written(source, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    for force in (False, True):
        with pytest.raises(
            UserError, match=r"has other files and no unfinished conversion; give a new or an empty"
        ):
            convert(*source, tmp_path / "mine", force=force)
    with pytest.raises(UserError, match=r"thesis\.txt is a file; give a new folder"):
        convert(*source, tmp_path / "mine" / "thesis.txt")
    with pytest.raises(UserError, match=r"lies in a folder that is read; give another one"):
        convert(*source, source[0] / "store")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_two_conversions_into_one_folder(source, tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(UserError, match=r"another conversion is writing to .*; wait for it to end"):
        convert(*source, tmp_path)
    first.close()
    convert(*source, tmp_path)


def test_a_journal_of_another_version(source, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "store"
    interrupt(source, out, 0.5, monkeypatch)
    path = out / JOURNAL
    path.write_text(path.read_text().replace(f'"version": {VERSION}', '"version": 0', 1))
    with pytest.raises(
        UserError, match=rf"was begun by another version \(store version 0, this program writes {VERSION}\)"
    ):
        convert(*source, out)
    convert(*source, out, force=True)


def test_a_drafter_in_float32_keeps_its_values(tmp_path: Path) -> None:
    def widen(tensors) -> None:
        tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.1.mlp.up_proj.weight"].astype(np.float32) / 3

    folder = edit_folder(copy_folder(micro_drafter(), tmp_path), widen)
    convert(micro_target(), folder, tmp_path / "store", verify=True)
    parameters = json.loads((tmp_path / "store" / MANIFEST).read_text())["parts"]["drafter"]["parameters"]
    assert {path for path, entry in parameters.items() if entry["dtype"] == "float32"} == {"layers.mlp_up"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to tell the peak")
def test_peak_memory_stays_far_below_a_layer(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "n_routed_experts": 224,
        "num_hidden_layers": 2,
    }
    write_checkpoint(tmp_path / "hf", sizes, shards=2)
    layer = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    peak = int(in_process(PEAK, tmp_path / "hf", tmp_path / "store"))
    assert layer > 200e6 and peak < 0.75 * layer, (peak, layer)


def test_the_command_prints_one_json_object(source, tmp_path: Path, capsys) -> None:
    run(ConvertOptions(source[0], tmp_path / "store"), QuietOptions(json_output=True))
    values = json.loads(capsys.readouterr().out)
    assert (
        values["written_bytes"] == values["store_bytes"]
        and values["parts"]["target"]["skipped_tensors"] == 35
    )
    run(ConvertOptions(source[0], tmp_path / "store", verify=True), QuietOptions())
    out, err = capsys.readouterr()
    assert "all checksums are right" in out and "Verifying" in err
