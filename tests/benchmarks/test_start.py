"""`bench start`: what it measures is the first character and the end, cold before warm."""

import sys

import pytest

from jddtree.benchmarks.decoding.start import measure, start
from jddtree.errors import UserError

SLOW_END = "import time; print('a', flush=True); time.sleep(0.4)"
COLD_FIRST = """
import os, pathlib, time
compiled = pathlib.Path(os.environ['XDG_CACHE_HOME']) / 'compiled'
if not compiled.exists():
    time.sleep(0.5)
    compiled.touch()
print('a')
"""


def python(program: str) -> list[str]:
    """The command that runs a program."""
    return [sys.executable, "-c", program]


def test_the_first_character_is_before_the_end(tmp_path) -> None:
    first, end = start(python(SLOW_END), str(tmp_path))
    assert end - first > 0.3


def test_a_cold_start_has_no_cache_and_a_warm_one_has() -> None:
    cold, warm = measure(python(COLD_FIRST), 2)
    assert (cold["start"], cold["runs"], warm["start"], warm["runs"]) == ("cold", 2, "warm", 2)
    assert cold["least_s"] - warm["least_s"] > 0.3
    assert cold["least_s"] <= cold["first_s"] <= cold["most_s"] <= cold["end_s"] + 0.5


@pytest.mark.parametrize("program", ["print('a'); raise SystemExit(3)", "pass"])
def test_a_command_that_fails_or_is_silent_is_named(program: str, tmp_path) -> None:
    with pytest.raises(UserError, match="python.*ended with"):
        start(python(program), str(tmp_path))
