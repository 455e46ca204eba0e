"""Tables of what `jddtree.benchmarks.scores` measured: columns and their formats by the name of the table."""

from jddtree import results

COLUMNS = {
    "scores": {
        "task": "",
        "metric": "",
        "value": ".4f",
        "stderr": ".4f",
        "n": "d",
        "errors": "d",
        "tokens": "d",
        "acceptance_length": ".2f",
        "seconds": ".0f",
    },
    "compare": {
        "dtype": "",
        "method": "",
        "tokens": "d",
        "rounds": "d",
        "acceptance_length": ".2f",
        "prompts": "d",
        "identical": "d",
    },
    "divergence": {"dtype": "", "id": "", "method": "", "position": "d", "margin": ".4f"},
    "perplexity": {
        "file": "",
        "tokens": "d",
        "bytes": "d",
        "token_perplexity": ".2f",
        "bits_per_byte": ".3f",
    },
}


def table_of(rows: list[results.Row], name: str) -> str:
    """The table of a name, one of COLUMNS."""
    return results.table([row for row in rows if row["table"] == name], COLUMNS[name])
