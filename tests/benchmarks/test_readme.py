"""README.md says what was measured and runs what it shows."""

import json
import re

import pytest
from conftest import ROOT

from jddtree.benchmarks.readme import PAGES, caption, with_tables

PARSER = re.compile(r"= option\(|add_argument\(")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_made_from_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table:" in text and with_tables(text) == text


def test_the_first_code_block_is_two_commands():
    """All that a newcomer needs: one runs the main job, one the tests, each on one line."""
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)[1].strip().splitlines()
    assert len(first) == 2
    assert first[0].endswith("run.py generate") and first[1].endswith("-m pytest")


def test_commands_name_options_that_exist():
    """Every long option in README.md is one of the command line's."""
    files = [*(ROOT / "jddtree").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]
    source = "\n".join(
        file.read_text(encoding="utf-8") for file in files if PARSER.search(file.read_text("utf-8"))
    )
    for option in set(re.findall(r"--[a-z][a-z-]+", README)) - {"--help"}:
        name = option[2:].replace("-", "_")
        assert option in source or f"{name}:" in source, option


@pytest.mark.parametrize("command", ["short --output a.json", "long " * 30])
def test_a_caption_is_one_short_line(command):
    """A long command is left to the file; day, card and version are always said."""
    record = {
        "command": command,
        "date": "2026-11-30T05:36:53+00:00",
        "card": "a card",
        "versions": {"torch": "2.11"},
    }
    line = caption(record, "docs/results/a.json")
    assert len(line) <= 110 and line.endswith(", 2026-11-30, a card, torch 2.11")
    assert line.startswith(
        "`short" if command.startswith("short") else "By the command in `docs/results/a.json`"
    )


def test_how_much_faster_than_the_peer_follows_from_the_results():
    """A verify pass of 33, 9 and 1 rows at 4096 tokens against the composed one."""
    times = {}
    for file in ("peers-step-h200", "step-h200"):
        rows = json.loads((ROOT / "docs" / "results" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
        size = {"stage": "verify", "context": 4096, "routing": "uniform"}
        timed = [row for row in rows if size.items() <= row.items() and "time_ms" in row]
        times[file] = {row["tokens"]: row["time_ms"] for row in timed}
    ratios = [times["peers-step-h200"][tokens] / times["step-h200"][tokens] for tokens in (33, 9, 1)]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast" in " ".join(README.split())
