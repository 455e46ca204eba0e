"""A draft tree as a picture: what is drawn of a hand-made round, which round is chosen, and the command."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jddtree.cli import trace
from jddtree.cli.main import app, guarded
from jddtree.evaluation.speculation.recording import Recording, Round
from jddtree.evaluation.speculation.tree_picture import most_telling, picture

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {0: "def", 1: " <b>", 2: "\n", 3: "a long token & more", 4: "(", 7: "end"}


def made(path):
    """A round of four nodes, 1 and 2 below the root, 3 and 4 below 1; every token is its row, the bonus token
    7.
    """
    return Round(
        tokens=np.arange(5, dtype=np.int32),
        parents=np.array([-1, 0, 0, 1, 1], np.int32),
        depths=np.array([0, 1, 1, 2, 2], np.int32),
        scores=np.log(np.array([1, 0.6, 0.3, 0.25, 0.125], np.float32)),
        choices=np.full(5, 7, np.int32),
        path=np.array(path, np.int32),
        emitted=len(path),
        experts=np.zeros((1, 5, 1), np.int32),
    )


def drawn(path, title="a title"):
    return ElementTree.fromstring(picture(made(path), WORDS.__getitem__, title))


def boxes(svg):
    """Style, x and y of every box in the order of the rows, the bonus token last."""
    return [(box.get("class"), float(box.get("x")), float(box.get("y"))) for box in svg.iter(f"{SVG}rect")]


def test_the_kept_path_is_filled_and_ends_in_the_bonus_token():
    found = boxes(drawn([0, 1, 4]))
    assert [style for style, *_ in found] == ["kept", "kept", "box", "box", "kept", "bonus"]
    columns = sorted({x for _, x, _ in found})
    assert [columns.index(x) for _, x, _ in found] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]])
def test_no_box_lies_on_another_or_outside(path):
    """The bonus token takes a free place, also where the target left the tree at its root."""
    svg = drawn(path)
    width, height = float(svg.get("width")), float(svg.get("height"))
    found = boxes(svg)
    for place, (_, x, y) in enumerate(found):
        assert 0 <= x < width - 104 and 0 <= y < height - 26
        assert all(x != other or abs(y - beside) >= 26 for _, other, beside in found[:place])


def test_an_edge_leads_to_every_node():
    svg = drawn([0, 1, 4])
    styles = [edge.get("class") for edge in svg.iter(f"{SVG}path")]
    assert sorted(styles) == ["edge", "edge", "kept-edge", "kept-edge", "kept-edge"]


def test_texts_are_escaped_shown_and_cut():
    """Markup in a token or a title stays text; white space has signs; a long token ends before its note."""
    texts = [text.text for text in drawn([0], "1 < 2").iter(f"{SVG}text")]
    assert texts[:10] == ["def", "root", "·<b>", "60%", "⏎", "30%", "a·long·…", "25%", "(", "12%"]
    assert texts[10:13] == ["end", "bonus", "1 < 2"] and len(texts) == 14


def test_the_round_that_leaves_the_first_choices_is_drawn():
    spine, branch, short = made([0, 1, 3]), made([0, 1, 4]), made([0, 2])
    assert most_telling([spine, branch, short]) is branch
    assert most_telling([spine, short]) is short
    assert most_telling([made([0]), spine]) is spine


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`trace` with the bundled pair, but rounds that are given: exit code, file, and the request that was
    recorded.
    """

    def call(rounds):
        asked = []
        monkeypatch.setattr(trace, "make_recorder", lambda model, requests: asked.extend(requests))
        monkeypatch.setattr(trace.recording, "record", lambda recorder, requests: [Recording([1], rounds)])
        path = tmp_path / "tree.svg"
        arguments = ["trace", "-p", "def f():", "--budget", "4", "--max-tokens", "8", "--output", str(path)]
        return guarded(lambda: app(arguments, standalone_mode=False)), path, asked[0]

    return call


def test_trace_draws_the_most_telling_round(run):
    code, path, asked = run([made([0]), made([0, 1, 4])])
    assert (code, asked.method, asked.budget, asked.max_tokens) == (0, "tree", 4, 8)
    svg = ElementTree.parse(path).getroot()
    title = "one pass of the target checks 4 nodes and gives 3 tokens; 2.00 a round in the whole text"
    assert svg.find(f"{SVG}title").text == title
    assert [style for style, *_ in boxes(svg)] == ["kept", "kept", "box", "box", "kept", "bonus"]


def test_trace_of_a_text_without_rounds_is_an_error(run, capsys):
    code, path, _ = run([])
    assert code == 1 and not path.exists()
    assert "give another --prompt" in capsys.readouterr().err
