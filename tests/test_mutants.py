"""The list of planted bugs fits the program: each text is there once, the change is a program, its tests
exist.
"""

import ast

import mutants
import pytest
from conftest import ROOT

MUTANTS = mutants.listed()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant) -> None:
    right = (ROOT / mutant.file).read_text(encoding="utf-8")
    wrong = mutants.changed(mutant, right)
    assert wrong != right
    ast.parse(wrong)
    files = [word for word in mutant.tests if word.endswith(".py")]
    assert files and all((ROOT / name).is_file() for name in files)
    if "-k" in mutant.tests:
        assert any(mutant.tests[-1] in (ROOT / name).read_text(encoding="utf-8") for name in files)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_gone_or_stands_twice_is_said() -> None:
    with pytest.raises(ValueError, match="holds 0 times"):
        mutants.changed(MUTANTS[0], "")
    with pytest.raises(ValueError, match="holds 2 times"):
        mutants.changed(MUTANTS[0], 2 * MUTANTS[0].old)
