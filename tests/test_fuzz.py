"""A short run of the fuzz of every reader; `python tests/fuzz.py` is the long one."""

from pathlib import Path

import fuzz

CASES = 700


def test_no_file_ends_in_a_traceback(tmp_path: Path) -> None:
    faults = list(fuzz.faults(fuzz.kinds(tmp_path), range(CASES), seed=0))
    assert not faults, f"{len(faults)} of {CASES} cases: {faults[0]}"


def test_a_fault_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2]}')

    def read() -> None:
        raise KeyError("lost") if path.read_text() != '{"a": [1, 2]}' else AssertionError("not changed")

    kind = fuzz.Kind("table", path, fuzz.mutated, read)
    (fault,) = fuzz.faults([kind], range(7, 8), seed=1)
    assert (fault.number, fault.kind) == (7, "table") and "KeyError: 'lost'" in fault.text
    assert path.read_text() == '{"a": [1, 2]}'
