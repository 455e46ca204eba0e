"""A draft tree as an SVG picture: its nodes from left to right by depth, and the path that the target kept.

root ──┬── " if" 62% ──── "not" 40%        kept nodes are filled, the bonus token is dashed;
       └── " for" 9%                       a percentage is the drafter's probability of the path to a node
"""

from collections.abc import Callable
from html import escape
from typing import NamedTuple

import numpy as np

from jddtree.evaluation.speculation.recording import Round

COLUMN = 132
LINE = 34
BOX_WIDTH = 104
BOX_HEIGHT = 26
LEAST_WIDTH = 660  # that of the legend
MARGIN = 14
CAPTION = 18
LEGEND = "filled: kept; dashed: the target's own next token; percent: the drafter's probability of the path"
SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥"}
LONGEST = 8  # characters; more would run into the note
STYLE = """
text { font: 13px ui-monospace, monospace; fill: #1f2328 }
.small { font-size: 10px; fill: #59636e }
.box { fill: #f6f8fa; stroke: #d1d9e0 }
.kept { fill: #b6e3ff; stroke: #0969da }
.bonus { fill: #dafbe1; stroke: #1a7f37; stroke-dasharray: 4 2 }
.edge { fill: none; stroke: #d1d9e0; stroke-width: 1.5 }
.kept-edge { fill: none; stroke: #0969da; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 }
.box { fill: #151b23; stroke: #3d444d } .edge { stroke: #3d444d }
.kept { fill: #0c2d6b; stroke: #4493f8 } .kept-edge { stroke: #4493f8 }
.bonus { fill: #0f2d17; stroke: #3fb950 }
}
"""


class Box(NamedTuple):
    """A token to draw: its text, its place (x, y of its left edge's middle), its style and a note below the
    text.
    """

    text: str
    x: float
    y: float
    style: str
    note: str


def picture(one: Round, text_of: Callable[[int], str], title: str) -> str:
    """SVG of a round. text_of: a token id's text; title: the first line below the tree, plain text."""
    boxes = _boxes(one, text_of)
    bottom = max(box.y for box in boxes) + LINE / 2 + MARGIN
    captions = [_caption(line, bottom + CAPTION * count) for count, line in enumerate((title, LEGEND), 1)]
    width = max(max(box.x for box in boxes) + BOX_WIDTH + MARGIN, LEAST_WIDTH)
    height = bottom + CAPTION * len(captions) + MARGIN
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    parts = [
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        *_edges(one, boxes),
        *map(_box, boxes),
    ]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', *parts, *captions, "</svg>"]
    return "\n".join(lines) + "\n"


def _caption(line: str, y: float) -> str:
    return f'<text class="small" x="{MARGIN}" y="{y:.0f}">{escape(line)}</text>'


def most_telling(rounds: list[Round]) -> Round:
    """A round whose kept path leaves the drafter's first choices, if there is one: the longest, then the
    widest.
    """

    def told(one: Round) -> tuple[bool, int, int]:
        leaves = len(one.tokens) - len(set(one.parents.tolist()) - {-1})
        return not bool(one.on_spine[one.path].all()), one.emitted, leaves

    return max(rounds, key=told)


def _boxes(one: Round, text_of: Callable[[int], str]) -> list[Box]:
    """A box for every row of the tree in its order, then one for the bonus token"""
    heights = _heights(one)
    kept = set(one.path.tolist())
    boxes = []
    for row, token in enumerate(one.tokens.tolist()):
        note = "root" if row == 0 else f"{100 * np.exp(one.scores[row]):.0f}%"
        x = MARGIN + COLUMN * float(one.depths[row])
        boxes.append(Box(_shown(text_of(token)), x, heights[row], "kept" if row in kept else "box", note))
    last = boxes[int(one.path[-1])]
    bonus = _shown(text_of(int(one.choices[one.path[-1]])))
    return [*boxes, Box(bonus, last.x + COLUMN, _free_height(boxes, last), "bonus", "bonus")]


def _heights(one: Round) -> list[float]:
    """Middle of every row's box: leaves below one another, parents at the middle of their children"""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(one.parents.tolist()):
        children.setdefault(parent, []).append(row)
    heights = [0.0] * len(one.tokens)
    leaves = 0

    def place(row: int) -> float:
        nonlocal leaves
        below = children.get(row, [])
        if not below:
            heights[row] = MARGIN + LINE * (leaves + 0.5)
            leaves += 1
        else:
            middle = [place(child) for child in below]
            heights[row] = (middle[0] + middle[-1]) / 2
        return heights[row]

    place(0)
    return heights


def _free_height(boxes: list[Box], last: Box) -> float:
    """The nearest height in the column after `last` at which no box stands"""
    taken = [box.y for box in boxes if box.x == last.x + COLUMN]
    steps = [last.y + sign * LINE * count for count in range(len(boxes) + 1) for sign in (1, -1)]
    free = [y for y in steps if y >= MARGIN + LINE / 2 and all(abs(y - other) >= LINE for other in taken)]
    return free[0]


def _edges(one: Round, boxes: list[Box]) -> list[str]:
    kept = set(one.path.tolist())
    edges = []
    for row, parent in enumerate(one.parents.tolist()):
        if parent >= 0:
            edges.append(_edge(boxes[parent], boxes[row], "kept-edge" if row in kept else "edge"))
    return [*edges, _edge(boxes[int(one.path[-1])], boxes[-1], "kept-edge")]


def _edge(start: Box, end: Box, style: str) -> str:
    begin = start.x + BOX_WIDTH
    middle = (begin + end.x) / 2
    curve = (
        f"M{begin:.1f} {start.y:.1f} C{middle:.1f} {start.y:.1f} {middle:.1f} {end.y:.1f} {end.x:.1f} "
        f"{end.y:.1f}"
    )
    return f'<path class="{style}" d="{curve}"/>'


def _box(box: Box) -> str:
    top = box.y - BOX_HEIGHT / 2
    return (
        f'<rect class="{box.style}" x="{box.x:.1f}" y="{top:.1f}" width="{BOX_WIDTH}" '
        f'height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{box.x + 7:.1f}" y="{box.y + 4.5:.1f}">{escape(box.text)}</text>'
        f'<text class="small" x="{box.x + BOX_WIDTH - 5:.1f}" y="{box.y + 4:.1f}" '
        f'text-anchor="end">{box.note}</text>'
    )


def _shown(text: str) -> str:
    """A token's text with its white space visible"""
    for blank, sign in SHOWN.items():
        text = text.replace(blank, sign)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
