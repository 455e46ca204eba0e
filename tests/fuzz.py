"""Hostile files against every reader: `python tests/fuzz.py --count 2000 --seed 0`.

A case is one file of one kind, changed by `hostile_json`, in a folder whose other files are sound. Its reader
may do two things: return, or raise a one-line `UserError`. Everything else is a fault, printed with its
number and traceback; the exit code is 1 then. A case follows from the seed and its number alone, so `--only
NUMBER` repeats it.
"""

import argparse
import json
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from hostile_json import in_bytes, mutated
from safetensors.numpy import save

from converters.checkpoint import INDEX_NAME, Checkpoint
from converters.storage.convert import convert
from converters.storage.journal import Journal
from converters.storage.manifest import JOURNAL, MANIFEST
from converters.storage.plan import changes
from converters.storage.store import Store
from converters.synthetic import write_checkpoint, write_drafter
from jddtree.cli.inspect import inspect, render
from jddtree.config import dflash_config, target_config
from jddtree.decoding.calibration import read_calibration
from jddtree.decoding.costs import read_costs
from jddtree.errors import UserError
from jddtree.evaluation.tasks.userfile import read_user_file
from jddtree.inputs import read_json, read_prompt
from jddtree.loading import bundled
from jddtree.models.rope import inverse_frequencies
from jddtree.text.chat import ChatTemplate
from jddtree.text.stops import stop_ids
from jddtree.text.tokenizer import Tokenizer

SIZES = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "add",
        "tool_calls": [
            {"id": "a:0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}
        ],
    },
    {"role": "tool", "tool_call_id": "a:0", "content": "4"},
]
TASKS = [
    {"prompt": "Capital of France?", "answer": "Paris", "id": 1},
    {"prompt": [{"role": "user", "content": "Count."}], "stop": ["4"], "max_tokens": 50},
]


@dataclass(frozen=True)
class Kind:
    """One kind of file. change: from its sound bytes to hostile ones; read: everything that uses it."""

    name: str
    path: Path
    change: Callable[[bytes, Random], bytes]
    read: Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """What went wrong in the case of a number."""

    number: int
    kind: str
    text: str


def kinds(folder: Path) -> list[Kind]:
    """Every kind, over sound files that are made in an empty folder."""
    target, drafter, store = _models(folder)
    header, calibration, cost = folder / "header", folder / "calibration.json", folder / "cost.json"
    _write_header(header)
    shutil.copyfile(bundled("target").parent / "calibration.json", calibration)
    shutil.copyfile(bundled("target").parent.parent / "costs" / "steep.json", cost)
    messages, ids, tasks = folder / "messages.json", folder / "ids.json", folder / "tasks.jsonl"
    messages.write_text(json.dumps(MESSAGES))
    ids.write_text("[1, 2, 3]")
    tasks.write_text("\n".join(map(json.dumps, TASKS)))
    journal = folder / "journal"
    _write_journal(journal)
    tokenizer, template = Tokenizer.from_directory(target), ChatTemplate.from_directory(target)
    return [
        Kind("target config", target / "config.json", mutated, lambda: _read_target(target, tokenizer)),
        Kind("drafter config", drafter / "config.json", mutated, lambda: _read_drafter(drafter)),
        Kind("index", target / INDEX_NAME, mutated, lambda: (Checkpoint(target), inspect(target))),
        Kind("header", header / "model.safetensors", _change_header, lambda: _read_tensors(header)),
        Kind("manifest", store / MANIFEST, mutated, lambda: _read_store(store)),
        Kind("journal", journal / JOURNAL, _change_lines, lambda: _read_journal(journal)),
        Kind("calibration", calibration, mutated, lambda: read_calibration(calibration)),
        Kind("cost", cost, mutated, lambda: read_costs(cost).arrays(64)),
        Kind("messages", messages, mutated, lambda: _read_messages(messages, template, tokenizer)),
        Kind("prompt ids", ids, mutated, lambda: read_prompt(None, None, ids, None)),
        Kind("tasks", tasks, _change_lines, lambda: read_user_file(tasks)),
        Kind("tokenizer config", target / "tokenizer_config.json", mutated, lambda: _read_tokenizer(target)),
        Kind("ranks", target / "tiktoken.model", in_bytes, lambda: _read_tokenizer(target)),
        Kind(
            "generation config",
            target / "generation_config.json",
            mutated,
            lambda: stop_ids(target, tokenizer),
        ),
    ]


def faults(every: list[Kind], numbers: Iterator[int] | range, seed: int) -> Iterator[Fault]:
    """Run the cases of these numbers; files are sound again afterwards."""
    sound = {kind.path: kind.path.read_bytes() for kind in every}
    for number in numbers:
        kind = every[number % len(every)]
        kind.path.write_bytes(kind.change(sound[kind.path], Random(f"{seed} {number}")))
        if text := _fault(kind):
            yield Fault(number, kind.name, text)
        kind.path.write_bytes(sound[kind.path])


def _fault(kind: Kind) -> str:
    """What the reader did that it must not do, empty when all is well."""
    try:
        kind.read()
    except UserError as error:
        return "" if "\n" not in str(error) else f"more than one line: {error}"
    except BaseException:  # a panic of a Rust library is no Exception
        return traceback.format_exc()
    return ""


def _models(folder: Path) -> tuple[Path, Path, Path]:
    """Small random models and their store."""
    target, drafter, store = folder / "target", folder / "drafter", folder / "store"
    write_drafter(drafter, write_checkpoint(target, SIZES), {"num_hidden_layers": 1})
    convert(target, drafter, store)
    return target, drafter, store


def _write_header(folder: Path) -> None:
    folder.mkdir()
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int32), "c": np.ones((), np.uint8)}
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def _write_journal(folder: Path) -> None:
    folder.mkdir()
    journal = Journal(folder)
    source = {"files": {"config.json": 7}, "digest": "0", "changed": {"config.json": 1}}
    journal.begin({"block_bytes": 1, "blocks": "0", "parts": {"target": source}})
    journal.add({0: (1, 2), 1: (3,)})
    journal.close()


def _change_header(data: bytes, random: Random) -> bytes:
    """The header is changed, the tensors stay; sometimes the length in front of it too, or the end is cut."""
    length = struct.unpack("<Q", data[:8])[0]
    header = mutated(data[8 : 8 + length], random)
    said = random.choice([0, 1, 1 << 40, len(header) + 8]) if random.random() < 0.05 else len(header)
    tail = data[8 + length :]
    return struct.pack("<Q", said) + header + (tail[:-1] if random.random() < 0.05 else tail)


def _change_lines(data: bytes, random: Random) -> bytes:
    """One line of several is changed."""
    lines = data.split(b"\n")
    place = random.choice([number for number, line in enumerate(lines) if line])
    return b"\n".join([*lines[:place], mutated(lines[place], random), *lines[place + 1 :]])


def _read_target(folder: Path, tokenizer: Tokenizer) -> None:
    inverse_frequencies(target_config(folder).rope)
    render(inspect(folder))
    stop_ids(folder, tokenizer)


def _read_drafter(folder: Path) -> None:
    inverse_frequencies(dflash_config(folder).rope)
    render(inspect(folder))


def _read_tensors(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name, entry in checkpoint.entries.items():
        if entry.dtype in ("F32", "I32", "U8"):
            checkpoint.read(name)


def _read_store(folder: Path) -> None:
    store = Store(folder)
    for part in ("target", "drafter"):
        reader = store.reader(part)
        for path in ("norm", "hidden_norm"):
            if path in reader.table:
                shape = reader.table[path].shape
                reader.fill(
                    path, 0, tuple(slice(0, size) for size in shape), np.empty(shape, reader.stored(path))
                )
    store.check()


def _read_journal(folder: Path) -> None:
    journal = Journal(folder)
    journal.close()
    if journal.header is not None:
        changes(journal.header, {"parts": {}})


def _read_messages(path: Path, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    template.encode(tokenizer, read_json(path, "--messages"))


def _read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_directory(folder)
    tokenizer.encode("hello <|im_end|>", allow_special=True)
    stop_ids(folder, tokenizer)


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    chosen = parser.parse_args()
    numbers = range(chosen.count) if chosen.only is None else range(chosen.only, chosen.only + 1)
    begun, count = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults(kinds(Path(folder)), numbers, chosen.seed):
            print(f"case {fault.number} of seed {chosen.seed}, {fault.kind}:\n{fault.text}")
            count += 1
    print(f"{len(numbers)} cases of seed {chosen.seed}: {count} faults, {time.perf_counter() - begun:.1f} s")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
