"""Routing as a trained router does it: recorded from the bundled micro model's trees, mapped to the experts of K2.6.

routing_trace.npz holds rounds of budget 64 over the bundled prompts: tokens uint16 [rounds, rows], and experts uint8
[rounds, MoE layers, rows, k], the micro router's choice; `python -m jddtree.benchmarks.step_trace` makes it again.

The mapping keeps what rows share. An expert of the micro model stands for a block of experts, 24 of K2.6's 384, and a
row takes two of each of its four blocks; which two follows from its token and the layer, so that rows of one token and
one micro expert take the same. A layer of K2.6 uses layer l % 5 of the micro model.
"""

from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jddtree.errors import UserError

ROUNDS, ROWS, BUDGET = 40, 65, 64
FILE = Path(str(files("jddtree") / "benchmarks" / "routing_trace.npz"))


class Trace(NamedTuple):
    """As in the file; experts_in_all: how many the recorded router chose from."""

    tokens: np.ndarray
    experts: np.ndarray
    experts_in_all: int


def load() -> Trace:
    """The bundled trace."""
    with np.load(FILE) as stored:
        return Trace(stored["tokens"], stored["experts"], int(stored["experts_in_all"]))


def mapped(trace: Trace, layers: int, rows: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """Experts int32 [layers, rows, top_k] of one round of the trace, which `seed` picks; rows beyond it are those of
    the next rounds. UserError where the numbers of experts and choices are no multiples of the trace's.
    """
    chosen = trace.experts.shape[-1]
    if experts % trace.experts_in_all or top_k % chosen:
        wanted = f"multiples of {trace.experts_in_all} experts and {chosen} choices"
        raise UserError(f"--routing trace needs {wanted}, but the model has {experts} and {top_k}")
    block, each = experts // trace.experts_in_all, top_k // chosen
    count = -(-rows // trace.tokens.shape[1])
    used = np.arange(seed, seed + count) % len(trace.tokens)
    tokens = trace.tokens[used].reshape(-1)[:rows]
    recorded = np.moveaxis(trace.experts[used], 1, 0).reshape(trace.experts.shape[1], -1, chosen)[:, :rows]

    def layer(index: int) -> np.ndarray:
        blocks = recorded[index % len(recorded)].astype(np.int32)
        orders = {token: _order(token, index, block, each) for token in set(tokens.tolist())}
        inside = np.stack([orders[token] for token in tokens.tolist()])
        return (blocks[:, :, None] * block + inside[:, None, :]).reshape(rows, top_k)

    return np.stack([layer(index) for index in range(layers)])


def _order(token: int, layer: int, block: int, each: int) -> np.ndarray:
    """Places inside a block that rows of this token take in this layer, int32 [each]"""
    return np.random.default_rng([token, layer]).choice(block, each, replace=False).astype(np.int32)


def record(path: Path) -> None:
    """Decode the bundled prompts and write the first whole rounds of each, in turn."""
    # Imported on use: a GPU machine that only measures may lack what tokenizers need.
    from jddtree.cli.inputs import read_prompts
    from jddtree.decoding.engine import Request
    from jddtree.evaluation import recording
    from jddtree.evaluation.speculation_report import make_recorder
    from jddtree.loading import load as load_model

    model = load_model()
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
