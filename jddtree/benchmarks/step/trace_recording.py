"""Records the routing that `jddtree.benchmarks.step.rank.routing_trace` maps; `python -m` writes its file
anew.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jddtree.benchmarks.step.rank.routing_trace import BUDGET, FILE, ROUNDS, ROWS
from jddtree.decoding.requests import Request
from jddtree.evaluation.speculation import recording
from jddtree.evaluation.speculation.report import make_recorder
from jddtree.inputs import read_prompts
from jddtree.loading import load


def record(path: Path) -> None:
    """Decode the bundled prompts and write the first whole rounds of each, in turn."""
    model = load()
    requests = [Request(prompt, 48, "tree", BUDGET) for prompt in read_prompts(model, None)]
    recordings = recording.record(make_recorder(model, requests), requests)
    whole = [[one for one in recorded.rounds if len(one.tokens) == ROWS] for recorded in recordings]

    def in_turn() -> Iterator[recording.Round]:
        for place in range(max(map(len, whole))):
            yield from (rounds[place] for rounds in whole if place < len(rounds))

    rounds = [one for one, _ in zip(in_turn(), range(ROUNDS), strict=False)]
    write = partial(np.savez_compressed, path, experts_in_all=model.target.n_routed_experts)
    write(
        tokens=np.stack([one.tokens for one in rounds]).astype(np.uint16),
        experts=np.stack([one.experts for one in rounds]).astype(np.uint8),
    )


if __name__ == "__main__":
    record(FILE)
