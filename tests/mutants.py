"""Plant each bug of `planted_bugs.toml` alone in a copy of the tree and run the tests that must notice it.

    python tests/mutants.py [--only NAME ...] [--list] [--seconds N]

Not collected by pytest and not run in CI: all of them take an hour or two. Prints a line for each; exit code
1 when one survives, runs out of time or has tests that do not run. What a test cannot notice ("unseen") only
counts when one does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = Path(__file__).with_name("planted_bugs.toml")
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist")
SECONDS = 900
VERDICTS = {0: "SURVIVED", 1: "killed"}  # by pytest's exit code


@dataclass(frozen=True)
class Mutant:
    """old stands exactly once in `file`; tests: arguments of pytest; unseen: why no test can notice, else
    empty.
    """

    name: str
    bug: str
    file: str
    old: str
    new: str
    tests: list[str]
    unseen: str = ""


def listed() -> list[Mutant]:
    """All of them."""
    return [Mutant(**entry) for entry in tomllib.loads(LISTED.read_text(encoding="utf-8"))["mutant"]]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree that goes at the end."""
    with tempfile.TemporaryDirectory(prefix="jddtree-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield tree


@contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The bug is in the tree. ValueError unless its text stands there exactly once."""
    file = tree / mutant.file
    right = file.read_text(encoding="utf-8")
    file.write_text(changed(mutant, right), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(right, encoding="utf-8")


def changed(mutant: Mutant, text: str) -> str:
    """The text of its file with the bug."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def verdict(mutant: Mutant, tree: Path, seconds: float) -> tuple[str, str]:
    """What became of it, and the test that failed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "no verdict in time", ""
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return VERDICTS.get(ended.returncode, f"tests did not run ({ended.returncode})"), failed[
        0
    ] if failed else ""


def main(given: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the tests of each")
    chosen = parser.parse_args(given)
    unknown = set(chosen.only or ()) - {mutant.name for mutant in listed()}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    wanted = [mutant for mutant in listed() if not chosen.only or mutant.name in chosen.only]
    if not chosen.list:
        return _run(wanted, chosen.seconds)
    for mutant in wanted:
        unseen = f" (unseen: {mutant.unseen})" if mutant.unseen else ""
        print(f"{mutant.name:3} {mutant.file}: {mutant.bug}{unseen}")
    return 0


def _run(wanted: Sequence[Mutant], seconds: float) -> int:
    bad = []
    with copied() as tree:
        for mutant in wanted:
            begun = time.monotonic()
            with planted(mutant, tree):
                found, failed = verdict(mutant, tree, seconds)
            expected = "SURVIVED" if mutant.unseen else "killed"
            bad += [] if found == expected else [mutant.name]
            print(
                f"{mutant.name:3} {found:10} {time.monotonic() - begun:5.0f} s  {mutant.bug}  {failed}",
                flush=True,
            )
    print(
        f"{len(wanted) - len(bad)} of {len(wanted)} as they must be"
        + (f"; not {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
