"""What the source says about its own structure: modules, what they import, and the longest way down.

`python tests/structure.py` prints the measures that test_structure.py asserts. Imports are static: those
inside functions and under TYPE_CHECKING count as well.
"""

import ast
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jddtree", "pallas_kernels", "converters")


@cache
def modules() -> dict[str, Path]:
    """Dotted name of every module to its file; a package is its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """The modules of this project that each module imports."""
    return {name: frozenset(set(_targets(path)) - {name}) for name, path in modules().items()}


def _targets(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules() or node.module in modules():
                    yield whole if whole in modules() else node.module


def longest_chain() -> list[str]:
    """The longest chain of modules of which each imports the next."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(target) for target in imports()[name]), key=len, default=()))

    return list(max(map(below, modules()), key=len))


def folder(name: str) -> str:
    """The folder of a module; a package's `__init__` and `__main__` belong to the package."""
    path = modules()[name].parent
    return ".".join(path.relative_to(ROOT).parts)


def arrows() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Pairs of different folders to the imports from the first into the second."""
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, targets in imports().items():
        for target in targets:
            if folder(name) != folder(target):
                pairs.setdefault((folder(name), folder(target)), []).append((name, target))
    return pairs


def lines(name: str) -> int:
    """Lines of a module's file."""
    return modules()[name].read_text(encoding="utf-8").count("\n")


def files_by_folder() -> dict[str, list[str]]:
    """Folders to their modules, the empty `__init__` left out."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        if path.name != "__init__.py":
            found.setdefault(folder(name), []).append(name)
    return found


if __name__ == "__main__":
    chain = longest_chain()
    counts = [len(targets) for targets in imports().values()]
    print(f"longest chain {len(chain)}: {' > '.join(chain)}")
    print(f"imports a file: median {statistics.median(counts)}, mean {statistics.mean(counts):.2f}")
    print(f"largest folder: {max((len(files), name) for name, files in files_by_folder().items())}")
    print(f"longest module: {max((lines(name), name) for name in modules())}")
