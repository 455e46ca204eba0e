"""Tables of `bench kernels` that can be printed row by row: columns have fixed widths, and a value may be
missing.
"""

from jddtree.results import Row

# Key of a row: heading, width and format.
CARD = {
    "kernel": ("kernel", 14, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "heads": ("heads", 5, "d"),
    "routing": ("routing", 8, ""),
    "experts": ("experts", 7, ".1f"),
    "megabytes": ("MB", 8, ".2f"),
    "gflop": ("GFLOP", 9, ".2f"),
    "floor_us": ("floor us", 8, ".1f"),
    "bound": ("bound by", 10, ""),
}
RESULTS = {
    "kernel": ("kernel", 17, ""),
    "implementation": ("implementation", 17, ""),
    "tokens": ("tokens", 6, "d"),
    "context": ("context", 7, "d"),
    "heads": ("heads", 5, "d"),
    "routing": ("routing", 8, ""),
    "experts": ("experts", 7, ".1f"),
    "time_us": ("us", 8, ".1f"),
    "tb_s": ("TB/s", 5, ".2f"),
    "tflop_s": ("TFLOP/s", 7, ".0f"),
    "ceiling_share": ("share", 5, ".0%"),
    "error": ("error", 7, ".1e"),
    "repeats_identical": ("same", 5, ""),
    "peer": ("peer", 17, ""),
    "peer_us": ("peer us", 8, ".1f"),
    "failure": ("failure", 7, ""),
}
Columns = dict[str, tuple[str, int, str]]


def head(columns: Columns) -> str:
    """Heading and rule of a Markdown table."""
    headings = " | ".join(f"{heading:<{width}}" for heading, width, _ in columns.values())
    rules = "|".join("-" * (width + 2) for _, width, _ in columns.values())
    return f"| {headings} |\n|{rules}|"


def line(row: Row, columns: Columns) -> str:
    """One row."""
    return f"| {' | '.join(_cell(row.get(key), width, form) for key, (_, width, form) in columns.items())} |"


def summary(rows: list[Row]) -> str:
    """The whole kernels among measured rows as one Markdown table, for docs/kernels.md."""
    columns = {key: RESULTS[key] for key in RESULTS if key not in ("tflop_s", "failure")}
    whole = [row for row in rows if row["kernel"] in ("expert_layer", "tree_attention")]
    return "\n".join([head(columns), *(line(row, columns) for row in whole)])


def _cell(value: object, width: int, form: str) -> str:
    text = "" if value is None else str(value) if isinstance(value, bool) else format(value, form)
    return f"{text:>{width}}" if form else f"{text:<{width}}"
