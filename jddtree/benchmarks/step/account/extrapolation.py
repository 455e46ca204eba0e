"""What eight GPUs would take, from the step of one rank and the cost of a reduction; an extrapolation, not
measured.

One rank's step has no collectives. A mesh of eight adds a float32 sum over ranks after the attention and
after the block of every layer and one for the embedding; their cost is that of a chain of dependent sums
measured on two GPUs of one host, by rows. On a card with less bandwidth the floor grows. What the step takes
beyond it grows in the same way (most_ms), or, as far as it is latency, not at all (least_ms). Sums over PCIe
were not measured here: their cost is the measured one, which is mostly latency, and the time that the bytes
of a ring take on the link.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jddtree.benchmarks.step.account.floor import PEER_RATE
from jddtree.results import Row

LAYERS, HIDDEN, WORLD = 61, 7168, 8
SUMS = 2 * LAYERS + 1
FORM = "psum_f32"
CONTEXT = 4096


class Card(NamedTuple):
    """name; rate: bytes per second that a copy reaches, the floor's; link: bytes per second between two cards
    where the sums were not measured on such a link, else None.
    """

    name: str
    rate: float
    link: float | None


# RTX PRO 6000: 1.79 TB/s is its published bandwidth; 50 GB/s is what PCIe 5.0 x16 carries in practice (63
# nominal).
CARDS = (Card("H200", PEER_RATE, None), Card("RTX PRO 6000", 1.79e12, 50e9))


def rows(step: Sequence[Row], mesh: Sequence[Row], card: Card) -> list[Row]:
    """A row for each verify pass at context 4096 with uniform routing: floor_ms of one rank on this card,
    sums_ms, and the whole pass, least_ms and most_ms.
    """
    measured = {
        row["rows"]: row["less_glue_us"] for row in mesh if row.get("part") == "sum" and row["form"] == FORM
    }
    found = []
    for row in step:
        if (
            row["stage"] == "verify"
            and row["context"] == CONTEXT
            and row["routing"] == "uniform"
            and "ratio" in row
        ):
            floor = row["floor_ms"] * CARDS[0].rate / card.rate
            once = (
                float(np.interp(row["tokens"], sorted(measured), [measured[key] for key in sorted(measured)]))
                / 1e3
            )
            if card.link is not None:
                once += 1e3 * 2 * (WORLD - 1) / WORLD * row["tokens"] * HIDDEN * 4 / card.link
            sums, beyond = SUMS * once, row["time_ms"] - row["floor_ms"]
            whole = {"least_ms": floor + beyond + sums, "most_ms": floor * row["ratio"] + sums}
            found.append(
                {
                    "cards": f"{WORLD} x {card.name}",
                    "tokens": row["tokens"],
                    "floor_ms": floor,
                    "sums_ms": sums,
                }
                | whole
            )
    return found
