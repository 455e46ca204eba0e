"""Every results file says what was run, when, on what and from which commit, in a way that can be run
again.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import import_module

import pytest
import typer
from conftest import ROOT

from jddtree import results
from jddtree.cli.main import app

FILES = sorted((ROOT / "docs" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GOOD = {
    "command": (
        "python -m jddtree.benchmarks.step --tokens 33 --output a.json && python run.py bench mesh --mesh 2"
    ),
    "date": "2026-11-30T05:36:53+00:00",
    "commit": "7f9d70574303",
    "card": "NVIDIA H200",
    "versions": {"jddtree": "0.1.0", "jax": "0.11.2", "python": "3.12.3"},
    "rows": [{}],
}


class Parsed(Exception):
    """The words of a command are its options."""


def git(*arguments):
    """Exit code and output."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


def whole_history() -> bool:
    """Whether this is a checkout that holds all its commits; a source archive and a shallow clone do not."""
    return (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == (0, "false")


def check_form(record) -> None:
    """When, on what, with which versions, and rows."""
    assert datetime.strptime(record["date"], "%Y-%m-%dT%H:%M:%S%z").utcoffset().total_seconds() == 0
    assert record["card"].strip() and record["rows"]
    assert {"jddtree", "python"} < set(record["versions"]) and {"jax", "torch"} & set(record["versions"])


def check_commit(record) -> None:
    """A commit without changes; one of the history, where that is here."""
    assert re.fullmatch(r"[0-9a-f]{12}", record["commit"]), record["commit"]
    if whole_history():
        assert git("merge-base", "--is-ancestor", record["commit"], "HEAD")[0] == 0, record["commit"]


def check_command(command: str, monkeypatch) -> None:
    """One or more commands of this project, whose own parsers take their words."""
    for part in command.split(" && "):
        words = shlex.split(part)
        assert words[0] == "python", part
        if words[1] == "run.py":
            check_words_of_typer(words[2:])
        else:
            assert words[1] == "-m" and words[2].startswith("jddtree.benchmarks."), part
            check_words_of_module(words[2], words[3:], monkeypatch)


def check_words_of_typer(words) -> None:
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words)).close()


def check_words_of_module(name: str, words, monkeypatch) -> None:
    """main parses first of all; it is stopped there."""
    real = argparse.ArgumentParser.parse_args

    def parse(parser, given=None, namespace=None):
        real(parser, given, namespace)
        raise Parsed

    module = import_module(name)
    module = import_module(f"{name}.__main__") if hasattr(module, "__path__") else module
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_results_file_can_be_measured_again(file, monkeypatch):
    record = json.loads(file.read_text(encoding="utf-8"))
    check_form(record)
    check_commit(record)
    check_command(record["command"], monkeypatch)


def test_a_good_record_is_taken(monkeypatch):
    check_form(GOOD)
    check_commit(GOOD)
    check_command(GOOD["command"], monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {"date": "2026-11-29"},
        {"date": "2026-11-29T20:05:26"},
        {"date": "2026-11-29T20:05:26+01:00"},
        {"card": " "},
        {"versions": {"jddtree": "0.1.0", "python": "3.12.3"}},
        {"versions": {"jax": "0.11.2", "python": "3.12.3"}},
        {"rows": []},
    ],
)
def test_a_record_without_its_origin_is_refused(changes):
    with pytest.raises((AssertionError, ValueError)):
        check_form(GOOD | changes)


@pytest.mark.parametrize("commit", ["unknown", "7f9d70574303+changes", "7f9d705", "0123456789ab"])
def test_a_record_of_no_commit_is_refused(commit):
    if commit == "0123456789ab" and not whole_history():
        pytest.skip("the history is not here")
    with pytest.raises(AssertionError):
        check_commit(GOOD | {"commit": commit})


@pytest.mark.parametrize(
    "command",
    [
        "mesh2.py (bfloat16 rule)",
        "python rank_step.py",
        "python -m converters.storage.convert",
        "python -m jddtree.benchmarks.nothing",
        "python -m jddtree.benchmarks.step --rows 33",
        "python -m jddtree.benchmarks.peers verify",
        "python run.py bench nothing",
        "python run.py bench kernels --peer peers.json",
        "python run.py bench step --tokens 33 && python rank_step.py",
    ],
)
def test_a_command_that_is_not_of_this_project_is_refused(command, monkeypatch, capsys):
    with pytest.raises(BaseException) as raised:  # argparse exits, typer has errors of its own
        check_command(command, monkeypatch)
    assert not isinstance(raised.value, (Parsed, KeyboardInterrupt))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_results_that_are_cited_are_here(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bresults/[\w-]+\.json", text):
        assert (ROOT / "docs" / name).is_file(), name


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    """Changes to what is measured are said; those of docs, permissions and untracked files are not, nor is
    another repository around an installed package taken for this one.
    """
    monkeypatch.delenv("JDDTREE_COMMIT", raising=False)
    root = tmp_path / "checkout"
    for name in ("code.py", "docs/a.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    monkeypatch.setattr(results, "ROOT", root)
    first = results.commit()
    assert re.fullmatch(r"[0-9a-f]{12}", first)
    (root / "docs" / "a.json").write_text("2")
    (root / "code.py").chmod(0o755)
    (root / "new.py").write_text("1")
    assert results.commit() == first
    (root / "code.py").write_text("2")
    assert results.commit() == f"{first}+changes"
    monkeypatch.setattr(results, "ROOT", root / "docs")
    assert results.commit() == "unknown"
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit() == "unknown"
