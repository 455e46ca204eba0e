"""How large the sizes may be that a program is compiled for, and why.

Anything beyond would compile for minutes or fill the memory, and win nothing. Limits that depend on a model
or on the machine (the context of a target, the devices of a mesh) are checked where those are known.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jddtree.errors import UserError

SLOW_ROWS = 512  # compiling for 1,024 rows took four times as long as for 64 on a CPU


class Limit(NamedTuple):
    """From `least` to `most`; reason: why not more."""

    least: int
    most: int
    reason: str

    def check(self, flag: str, value: int | None) -> None:
        """Raise UserError for a value outside; None is none."""
        if value is not None and not self.least <= value <= self.most:
            reason = f" ({self.reason})" if value > self.most else ""
            raise UserError(f"{flag} is {value}, but must be {self.least} to {self.most}{reason}")


NODES = Limit(0, 1024, "more nodes are hardly ever accepted and take minutes to compile")
ROWS = Limit(1, NODES.most + 8, "the root and the most nodes, in whole tiles")
CANDIDATES = Limit(1, NODES.most, "no tree has more nodes")
CONTEXT = Limit(2, 1 << 24, "no target takes so many tokens")
CHUNK = Limit(1, 1 << 13, "every token of a chunk meets every other one")
ROUNDS = Limit(1, 1 << 10, "no text is seen before the last of them")
SEQUENCES = Limit(1, 1 << 10, "caches and rows are compiled for all of them")
TOKENS = Limit(1, 2**31 - 1, "counts are 32 bits")
SEED = Limit(0, 2**32 - 1, "it is 32 bits")
DEVICES = Limit(1, 1 << 12, "no mesh has so many devices")
COUNT = Limit(1, 10**6, "nobody would wait for it")
PROCESS = Limit(0, DEVICES.most - 1, DEVICES.reason)
CLI_LIMITS: Mapping[str, Limit] = {
    "budget": NODES,
    "capacity": ROWS,
    "top_k_cap": CANDIDATES,
    "max_context": CONTEXT,
    "prefill_chunk": CHUNK,
    "rounds_per_dispatch": ROUNDS,
    "batch": SEQUENCES,
    "max_tokens": TOKENS,
    "seed": SEED,
    "mesh": DEVICES,
    "processes": DEVICES,
    "process_id": PROCESS,
    "world": DEVICES,
    "threads": DEVICES,
    "limit": COUNT,
    "layers": COUNT,
    "experts": COUNT,
    "seeds": COUNT,
    "runs": COUNT,
    "tau_seeds": Limit(0, COUNT.most, COUNT.reason),
}
"""Limits by the name of an option."""


def check_sizes(options: Mapping[str, Any]) -> None:
    """Raise UserError for an option of `CLI_LIMITS` that is an integer out of its limits."""
    for name, value in options.items():
        if name in CLI_LIMITS and isinstance(value, int):
            CLI_LIMITS[name].check(f"--{name.replace('_', '-')}", value)


def slowness(rows: int) -> str | None:
    """What to say before compiling for trees of so many rows, None where it is quick."""
    if rows <= SLOW_ROWS:
        return None
    return f"compiling for trees of {rows} rows may take minutes; a lower --budget or --capacity takes less"
