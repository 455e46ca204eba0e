"""What the documentation names exists: files, links, commands and their options."""

import argparse
import ast
import io
import json
import re
import shlex
import sys
import tokenize
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.testing import CliRunner

from jddtree.cli.main import app

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "results").glob("*.md"))]
FILES = sorted((DOCS / "results").glob("*.json"))
FOLDERS = ("jddtree", "pallas_kernels", "converters", "tests", "docs")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+|[\w-]+\.py")
CHOSEN_BY_THE_READER = "NAME"  # in the paths of files to be written
# Files of K2.6's folder and of held-out sources, and an example in a docstring.
ELSEWHERE = {"tokenization_kimi.py", "tool_declaration_ts.py", "idlelib/window.py", "a.py"}
OPTIONAL = "jddtree.evaluation.lm_eval_adapter"  # needs a package of an extra
PROGRAM = re.compile(r"(?:python )?run\.py \w.*|python -m (?:jddtree|converters|pallas_kernels)\.\w.*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def spans(text: str) -> list[str]:
    """What stands in backticks, and the lines of shell blocks without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [*lines, *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))]


def paths(text: str) -> set[str]:
    """Files and folders of this repository that a page names in backticks."""
    return {span for span in spans(text) if PATH.fullmatch(span) and CHOSEN_BY_THE_READER not in span}


def commands(text: str) -> set[str]:
    """Commands of this project that a page names."""
    parts = [part.strip() for span in spans(text) for part in span.split("&&")]
    return {part for part in parts if PROGRAM.fullmatch(part)}


@cache
def python_files() -> set[str]:
    """Paths of the checkout's Python files."""
    return {str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {
        str(ROOT / "run.py")
    }


def exists(path: str) -> bool:
    """A path from the top, or the name of some Python file."""
    return (
        (ROOT / path).exists() if "/" in path else any(file.endswith(f"/{path}") for file in python_files())
    )


@cache
def typer_help(words: tuple[str, ...]) -> str:
    """What `run.py WORDS --help` prints."""
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (words, result.output)
    return result.output


def command_words(words: list[str]) -> tuple[str, ...]:
    """The words that name a command of run.py, its options and arguments left out."""
    found, names = typer.main.get_command(app), []
    while hasattr(found, "commands") and words and not words[0].startswith("-"):
        assert words[0] in found.commands, f"run.py has no command {words[0]}"
        found, names, words = found.commands[words[0]], [*names, words[0]], words[1:]
    return tuple(names)


@cache
def module_help(name: str) -> str:
    """What `python -m NAME --help` prints; with subcommands the help of each as well."""
    module = import_module(name)
    main = (import_module(f"{name}.__main__") if hasattr(module, "__path__") else module).main
    return printed(main)


def printed(main) -> str:
    """The help of every parser that `main` makes, which ends with code 0 when it is asked for help."""
    parsers: list[argparse.ArgumentParser] = []
    real = argparse.ArgumentParser.__init__

    def made(parser, *arguments, **options):
        real(parser, *arguments, **options)
        parsers.append(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "__init__", made)
        patch.setattr(sys, "argv", ["program", "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return "\n".join(parser.format_help() for parser in parsers)


def help_of(command: str) -> str:
    """What a command says of its options."""
    words = shlex.split(command)
    words = words[1:] if words[0] == "python" else words
    return module_help(words[1]) if words[0] == "-m" else typer_help(command_words(words[1:]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_exist(page):
    assert not [path for path in paths(page.read_text(encoding="utf-8")) if not exists(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """A link within the repository is to a file of it, from where the page is."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page):
    for command in sorted(commands(page.read_text(encoding="utf-8"))):
        text = help_of(command)
        missing = [option for option in OPTION.findall(command) if not re.search(rf"{option}(?![\w-])", text)]
        assert not missing, (command, missing)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_commands_of_results_have_help(file):
    for command in json.loads(file.read_text(encoding="utf-8"))["command"].split(" && "):
        assert help_of(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_imports_of_examples_resolve(page):
    """Python blocks parse, and what they import from this project is there."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module.startswith("jddtree")
                and node.module != OPTIONAL
            ):
                parent = import_module(node.module)
                for alias in node.names:
                    assert hasattr(parent, alias.name) or import_module(f"{node.module}.{alias.name}")


def test_a_newcomer_is_told_files_that_exist():
    """The four lists of docs/extending.md, each in the order in which one works."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(sections) == 4
    for section in sections:
        assert len(paths(section)) >= 5 and "1. " in section and "Tests: " in section


def test_nothing_refers_to_what_a_visitor_lacks():
    """No page and no source names files outside the repository."""
    lacking = re.compile(r"\bshared/facts|\bfacts[ ,/][\d.k]|\(design, section|rank_step\.py(?!`)")
    found = [path for path in (*PAGES, *sources()) if lacking.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_files_that_sources_name_exist():
    """A docstring or comment names a Python file of the checkout, by the end of its path."""
    lost = {}
    for path in sources():
        for name in re.findall(r"[\w/]+\.py\b", "\n".join(said(path.read_text(encoding="utf-8")))):
            if name not in ELSEWHERE and not any(place.endswith(f"/{name}") for place in python_files()):
                lost.setdefault(path.name, []).append(name)
    assert not lost


def sources() -> list[Path]:
    """The Python files of the package."""
    return [path for folder in FOLDERS[:3] for path in (ROOT / folder).rglob("*.py")]


def said(source: str) -> list[str]:
    """Docstrings and comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [*comments, *filter(None, map(ast.get_docstring, nodes))]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("see `jddtree/nowhere.py`", True),
        ("see `nowhere.py` and `jddtree/nowhere/`", True),
        ("see `jddtree/api.py`, `readme.py`, `docs/results/` and `jddtree/models/drafters/NAME.py`", False),
    ],
)
def test_a_lost_path_is_seen(text, lost):
    assert bool([path for path in paths(text) if not exists(path)]) == lost


@pytest.mark.parametrize(
    "command",
    ["python run.py dance", "python run.py bench round", "python -m jddtree.benchmarks.nothing --help"],
)
def test_a_lost_command_is_seen(command):
    (found,) = commands(f"`{command}`")
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        help_of(found)


def test_a_lost_option_is_seen():
    text = help_of("python run.py bench step --tokens 33")
    assert "--tokens" in text and "--rows" not in text
