"""The text of a generation with its rounds in colours, so that one sees on a terminal what each round
gave.
"""

from jddtree.serving.transcript import Piece

COLOURS = ("36", "33", "35", "32", "34")  # ANSI foregrounds that are legible on light and dark
PLAIN = "0"


class Painter:
    """Colours rounds in turn. wanted: --show-rounds, None where a terminal decides; terminal: stdout is
    one.
    """

    def __init__(self, wanted: bool | None, terminal: bool):
        self.colours = terminal and wanted is not False
        self.rounds = 0

    def paint(self, piece: Piece) -> str:
        """The text of a piece, its rounds in colours of their own; plain text elsewhere."""
        if not self.colours:
            return piece.text
        parts = [self._painted(text) for text, _ in piece.rounds]
        rest = piece.text[sum(len(text) for text, _ in piece.rounds) :]
        return "".join(parts) + rest

    def _painted(self, text: str) -> str:
        colour = COLOURS[self.rounds % len(COLOURS)]
        self.rounds += 1
        return f"\033[{colour}m{text}\033[{PLAIN}m" if text else ""
