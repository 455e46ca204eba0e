"""The bundled pair on this device against the traces of the published implementations.

python -m jddtree.benchmarks.traces --golden tests/golden --output docs/results/traces-h200.json

--golden names the folder of traces.json and bf16.json (tests/golden/README.md), which an installed package
lacks. Rows by "part":

* "decoding": texts of a dtype by decoder. same_tokens: texts whose tokens are the trace's; same_rounds: those
  whose rounds also emitted as many tokens each. float32 takes the plain kernels and must have all of them;
  bfloat16 takes those of the device, and its row only says how many it has.
* "bfloat16": log-probabilities along the traces, teacher-forced, beside float32. agreement: share of the
  places where the most probable token is the trace's; mean, p99, largest: difference of the token's
  log-probability, in nats; published: the same of the published implementation's own bfloat16 run; within:
  whether the mean is no larger than its. The others are set by a few places, which another order of sums
  changes.

Exit code 1 when float32 differs from a trace or bfloat16 is not within.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jddtree import results
from jddtree.benchmarks.kernels.printing import head, line
from jddtree.benchmarks.kernels.sizes import check_output
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.state import Capacity
from jddtree.errors import UserError
from jddtree.evaluation.likelihood import Scorer, TokenScores
from jddtree.loading import Model, load
from jddtree.results import Row
from jddtree.serving.engines import compile_engine

REFERENCE_EPS = 1e-6  # of the norms after q_a and kv_a in the published implementation
TOKENS = 96  # of a trace that no stop token ended
CAPACITY = Capacity(rows=65, candidates=64, context=384, rounds=8, chunk=64, widths=(9,))
COLUMNS = {
    "part": ("part", 8, ""),
    "dtype": ("dtype", 8, ""),
    "kernels": ("kernels", 7, ""),
    "decoder": ("decoder", 9, ""),
    "texts": ("texts", 5, "d"),
    "same_tokens": ("same tokens", 11, "d"),
    "same_rounds": ("same rounds", 11, "d"),
    "agreement": ("agreement", 9, ".4f"),
    "mean": ("mean", 6, ".4f"),
    "p99": ("p99", 6, ".4f"),
    "largest": ("largest", 7, ".4f"),
    "within": ("within", 6, ""),
}


class Golden(NamedTuple):
    """cases: the traces; published: figures of the published bfloat16 run, by name."""

    cases: list[dict[str, Any]]
    published: dict[str, float]


def read_golden(folder: Path) -> Golden:
    """UserError when the folder has no such files."""
    try:
        cases = json.loads((folder / "traces.json").read_text(encoding="utf-8"))["cases"]
        rule = json.loads((folder / "bf16.json").read_text(encoding="utf-8"))
        apart = rule["abs_logprob_difference"]
        published = {"agreement": rule["argmax_agreement"], "mean": apart["mean"], "p99": apart["p99"]}
        return Golden(cases, published | {"largest": apart["max"]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--golden {folder} has no traces ({error!r}); give the checkout's tests/golden"
        ) from None


def measure(golden: Golden) -> Iterator[Row]:
    """The rows, float32 first."""
    exact = _load("float32")
    yield from decoding_rows(exact, "xla", golden.cases)
    wanted = scores(exact, "xla", golden.cases)
    rounded = _load("bfloat16")
    yield from decoding_rows(rounded, "auto", golden.cases)
    for kernels in ("auto", "xla"):
        yield bfloat16_row(wanted, scores(rounded, kernels, golden.cases), kernels, golden)


def decoding_rows(model: Model, kernels: str, cases: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """A row for each decoder of the traces. kernels: implementation, auto for the device's own."""
    engine = compile_engine(model, CAPACITY, kernels)
    for decoder in cases[0]["decoders"]:
        same = [_same(_decode(engine, _request(case, decoder)), case, decoder) for case in cases]
        yield _row("decoding", model.dtype.name, kernels) | {
            "decoder": decoder,
            "texts": len(cases),
            "same_tokens": sum(tokens for tokens, _ in same),
            "same_rounds": sum(rounds for _, rounds in same),
        }


def scores(model: Model, kernels: str, cases: Sequence[dict[str, Any]]) -> list[TokenScores]:
    """What the target says at each token of the traces, teacher-forced."""
    scorer = Scorer(model, CAPACITY.context, kernels=kernels)
    return [_of_trace(scorer.score(case["prompt"]["ids"] + case["tokens"]), case) for case in cases]


def bfloat16_row(
    wanted: Sequence[TokenScores], found: Sequence[TokenScores], kernels: str, golden: Golden
) -> Row:
    """How far bfloat16 is from float32, beside the published run. wanted: float32."""
    tokens = np.array([token for case in golden.cases for token in case["tokens"]])
    exact, rounded = (np.concatenate([one.log_probs for one in some]) for some in (wanted, found))
    best = np.concatenate([one.best for one in found])
    apart = np.abs(exact - rounded)
    sizes = {"mean": apart.mean(), "p99": np.quantile(apart, 0.99), "largest": apart.max()}
    row = {"agreement": float((best == tokens).mean())} | {name: float(size) for name, size in sizes.items()}
    whole = _row("bfloat16", "bfloat16", kernels) | {"texts": len(golden.cases), "places": len(tokens)} | row
    return whole | {"published": golden.published, "within": row["mean"] <= golden.published["mean"]}


def _load(dtype: str) -> Model:
    """The bundled pair on one device, with the eps of the published implementation"""
    return load(dtype=dtype, mesh=1, latent_norm_eps=REFERENCE_EPS)


def _of_trace(scored: TokenScores, case: dict[str, Any]) -> TokenScores:
    """Without the places of the prompt"""
    return TokenScores(*(values[len(case["prompt"]["ids"]) - 1 :] for values in scored))


def _request(case: dict[str, Any], decoder: str) -> Request:
    """One token more than the trace has, so that its last round is seen even where it ends exactly there"""
    method, _, budget = decoder.partition("_")
    return Request(case["prompt"]["ids"], TOKENS + 1, method, int(budget or 0), stop_ids=case["stop_ids"])


def _decode(engine: Engine, request: Request) -> list[list[int]]:
    """The ids of every round, the first token as a round of its own"""
    state, controls, (first,), (finish,) = engine.start([request])
    rounds = [first]
    while finish is None:
        state, dispatch = engine.run(state, controls)
        (finish,) = dispatch.finish
        rounds += dispatch.tokens[0]
    return rounds


def _same(rounds: Sequence[Sequence[int]], case: dict[str, Any], decoder: str) -> tuple[bool, bool]:
    """Whether the tokens are the trace's, and the number of them in every round, but for a last one that is
    cut
    """
    tokens = [token for emitted in rounds for token in emitted]
    decoded = case["decoders"][decoder]
    wanted = decoded.get("lengths", [1] * decoded["rounds"])
    lengths = [len(emitted) for emitted in rounds[1:]]
    same_tokens = tokens[:TOKENS] == case["tokens"]
    return same_tokens, same_tokens and len(lengths) == len(wanted) and lengths[:-1] == wanted[:-1]


def _row(part: str, dtype: str, kernels: str) -> Row:
    return {"part": part, "dtype": dtype, "kernels": kernels}


def _failed(row: Row) -> bool:
    if row["part"] == "bfloat16":
        return not row["within"]
    return row["dtype"] == "float32" and min(row["same_tokens"], row["same_rounds"]) < row["texts"]


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jddtree.benchmarks.traces", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--golden", type=Path, required=True, help="folder of traces.json and bf16.json")
    parser.add_argument("--output", type=Path, help="also write the rows to this results file")
    chosen = parser.parse_args(given)
    try:
        golden = read_golden(chosen.golden)
        check_output(chosen.output)
        rows = _show(measure(golden), chosen.output)
        if failed := [row for row in rows if _failed(row)]:
            first = " ".join(line(failed[0], COLUMNS).split())
            raise UserError(f"{len(failed)} of {len(rows)} rows are not what they must be, first {first}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _show(measured: Iterator[Row], output: Path | None) -> list[Row]:
    """Print the rows as they are done, then one JSON object; the file is written again after each"""
    sys.stdout.write(head(COLUMNS) + "\n")
    rows = []
    for row in measured:
        rows.append(row)
        sys.stdout.write(line(row, COLUMNS) + "\n")
        sys.stdout.flush()
        if output is not None:
            results.write(output, rows)
    sys.stdout.write(json.dumps(results.record(rows)) + "\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
