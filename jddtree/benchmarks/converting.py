"""Conversion at real widths: speed against cp of the same bytes, peak memory, and what killing it costs.

python -m jddtree.benchmarks.converting FOLDER --output docs/results/convert-cpu.json

Makes a random checkpoint of one dense and some MoE layers of Kimi K2.6 in FOLDER, copies and converts it by
turns with the files out of the page cache, then converts it once more while killing it at random moments.
Each command is followed by sync, which counts. FOLDER needs room for the checkpoint twice; everything made in
it is removed.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from converters.storage.convert import convert
from converters.storage.store import Store, sum_of_file
from converters.synthetic import write_checkpoint
from jddtree import results

MODULE = "jddtree.benchmarks.converting"
MB = 1e6
# What is measured and killed: a process without JAX that prints the bytes done, then the peak of its resident
# memory, which the kernel resets at exec (ru_maxrss does not: it keeps the parent's).
CHILD = """
import sys
from pathlib import Path
from converters.storage.convert import convert

tell = lambda stage, done, total: print(done, flush=True)
convert(Path(sys.argv[1]), None, Path(sys.argv[2]), progress=tell)
status = Path("/proc/self/status").read_text().splitlines()
print(1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM")))
"""


def measure(
    folder: Path, moe_layers: int, experts: int, rounds: int, kills: int, seed: int
) -> list[dict[str, Any]]:
    """One row for each step; bytes, seconds and MB/s (10^6 bytes)."""
    source, copy, store = folder / "source", folder / "copy", folder / "store"
    sizes = {"num_hidden_layers": 1 + moe_layers, "n_routed_experts": experts, "vocab_size": 1280}
    made = _timed(lambda: write_checkpoint(source, sizes, seed, shards=2 + moe_layers, preset="k2.6"))
    total = _bytes_of(source)
    rows: list[dict[str, Any]] = [
        {"step": "make", "bytes": total, "seconds": made, "mb_per_s": total / made / MB, "values": sizes}
    ]
    layer = _layer_bytes(source, store, moe_layers)
    for number in range(rounds):
        for step, arguments, out in (
            ("cp", ["cp", "-r", str(source), str(copy)], copy),
            ("convert", [sys.executable, "-c", CHILD, str(source), str(store)], store),
        ):
            rows.append(_command(step, number, arguments, source, total))
            sums = {
                path.relative_to(out): sum_of_file(path) for path in sorted(out.rglob("*")) if path.is_file()
            }
            shutil.rmtree(out)
    for row in rows:
        if row["step"] == "convert":
            row |= {"layer_bytes": layer, "peak_to_layer": row["peak_bytes"] / layer}
    best = {step: min(row["seconds"] for row in rows if row["step"] == step) for step in ("cp", "convert")}
    rows.append({"step": "ratio", "convert_to_cp_speed": best["cp"] / best["convert"]})
    rows.append(_killed(source, store, kills, seed))
    again = {
        path.relative_to(store): sum_of_file(path) for path in sorted(store.rglob("*")) if path.is_file()
    }
    rows[-1]["identical"] = again == sums
    verified = _timed(lambda: convert(source, None, store, verify=True))
    rows.append({"step": "verify", "seconds": verified, "mb_per_s": total / verified / MB})
    checked = _timed(lambda: Store(store).check())
    rows.append({"step": "check", "seconds": checked, "mb_per_s": total / checked / MB})
    return rows


def _killed(source: Path, store: Path, kills: int, seed: int) -> dict[str, Any]:
    """Convert while killing the process at random byte counts, then to the end."""
    size = convert(source, None, store, dry_run=True).plan.nbytes
    points = sorted(random.Random(seed).sample(range(size), kills))
    begun = time.perf_counter()
    for point in points:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(source), str(store)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= point:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        process.stdout.close()
        if process.returncode != -signal.SIGKILL or (store / "manifest.json").exists():
            raise RuntimeError(
                f"the process ended with {process.returncode} instead of being killed at {point}"
            )
    outcome = convert(source, None, store)
    return {
        "step": "killed",
        "bytes": size,
        "points": points,
        "seconds": time.perf_counter() - begun,
        "resumed_bytes_of_the_last_run": outcome.resumed,
    }


def _command(step: str, number: int, arguments: Sequence[str], source: Path, total: int) -> dict[str, Any]:
    """Run a command with the source out of the page cache, and sync. cpu_seconds are the command's alone."""
    _forget(source)
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = time.perf_counter() - begun
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - begun
    peak = {"peak_bytes": int(done.stdout.split()[-1])} if done.stdout else {}
    return peak | {
        "step": step,
        "round": number,
        "bytes": total,
        "seconds": seconds,
        "seconds_before_sync": ended,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "mb_per_s": total / seconds / MB,
    }


def _layer_bytes(source: Path, store: Path, moe_layers: int) -> int:
    sizes = convert(source, None, store, dry_run=True).plan.parts[0].sizes
    return sum(size for name, size in sizes.items() if name.startswith(("moe.", "experts."))) // moe_layers


def _forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    subprocess.run(["sync"], check=True)
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moe-layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = measure(given.folder, given.moe_layers, given.experts, given.rounds, given.kills, given.seed)
    finally:
        for name in ("source", "copy", "store"):
            shutil.rmtree(given.folder / name, ignore_errors=True)
    record = results.record(rows)
    record["command"] = record["command"].replace(str(given.folder), "FOLDER")
    text = json.dumps(record, indent=1)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
