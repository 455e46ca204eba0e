"""Tokens per round of prompt lookup, prompt by prompt: the bundled prompts, and a text that repeats itself.

python -m jddtree.benchmarks.decoding.prompt_lookup --output docs/results/ngram-cpu.json

Rows: prompt (its first words), prompt_tokens, tokens, and tokens per round of "chain" and of trees by their
nodes; same_text says whether all of them wrote what plain decoding writes; the last row is of all prompts.
Greedy, without stop tokens. Tokens per round do not depend on the machine, and nothing here is timed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jddtree import results
from jddtree.benchmarks.kernels.sizes import check_output
from jddtree.decoding.engine import Request
from jddtree.limits import TOKENS
from jddtree.loading import Model, bundled, load
from jddtree.prompts import prompt_ids
from jddtree.results import Row
from jddtree.serving.engines import compile_engine, default_capacity
from jddtree.serving.generation import generate_batch
from jddtree.serving.transcript import Result

MODULE = "jddtree.benchmarks.decoding.prompt_lookup"
REPEATED = "def area(w, h):\n    return w * h\n\n" * 5
WAYS = {"chain": ("chain", 0), "tree 8": ("tree", 8), "tree 32": ("tree", 32)}
LARGEST = 32
SHOWN = 24  # characters of a prompt that name it
COLUMNS = {
    "prompt": "",
    "prompt_tokens": "d",
    "tokens": "d",
    **dict.fromkeys(WAYS, ".2f"),
    "same_text": "",
}


def measure(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Row]:
    """A row for each prompt and one for all; prompts: token ids. They are decoded together, in one batch a
    way.
    """
    longest = Request([0] * max(map(len, prompts)), max_tokens, budget=LARGEST)
    engine = compile_engine(model, default_capacity(model, longest, sequences=len(prompts)))

    def decoded(method: str, budget: int) -> list[Result]:
        requests = [Request(prompt, max_tokens, method, budget) for prompt in prompts]
        return generate_batch(model, engine, requests)

    plain = decoded("ar", 0)
    by_way = {name: decoded(*way) for name, way in WAYS.items()}

    def row(n: int) -> Row:
        return _row(model, plain[n : n + 1], {name: found[n : n + 1] for name, found in by_way.items()})

    return [*map(row, range(len(plain))), _row(model, plain, by_way) | {"prompt": "all"}]


def _row(model: Model, plain: Sequence[Result], by_way: dict[str, list[Result]]) -> Row:
    shown = [token for token in plain[0].prompt_ids if token not in model.defaults.raw_prefix]
    first = model.tokenizer.decode(shown).split()
    texts = [one.token_ids for one in plain]
    return {
        "prompt": " ".join(first)[:SHOWN],
        "prompt_tokens": sum(len(one.prompt_ids) for one in plain),
        "tokens": sum(map(len, texts)),
        **{name: _length(way) for name, way in by_way.items()},
        "same_text": all([one.token_ids for one in way] == texts for way in by_way.values()),
    }


def _length(found: Sequence[Result]) -> float:
    """Tokens per round, bonus included"""
    rounds = [emitted for one in found for emitted in one.statistics.emitted_per_round]
    return sum(rounds) / len(rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module's docstring; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--max-tokens", type=int, default=97, help="tokens per prompt")
    parser.add_argument("--output", type=Path, help="file to write the rows to")
    given = parser.parse_args(arguments)
    TOKENS.check("--max-tokens", given.max_tokens)
    check_output(given.output)
    model = load(draft="ngram", dtype="float32", mesh=1)
    prompts = json.loads((bundled("target").parent / "prompts.json").read_text(encoding="utf-8"))
    ids = [prompt_ids(model, prompt) for prompt in prompts] + [prompt_ids(model, REPEATED, raw=True)]
    rows = measure(model, ids, given.max_tokens)
    print(results.table(rows, COLUMNS))
    if given.output is not None:
        results.write(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
