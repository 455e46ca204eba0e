"""Pictures of a speculation report: one PNG per question, drawn without a display and without global state.

matplotlib is imported on use; it is an extra (`jddtree[eval]`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jddtree.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jddtree.results import Report

SIZE, DPI = (7.2, 4.5), 130  # inches, dots per inch
FEWEST_NODES = 20  # a share of fewer is noise
BLUE, ORANGE, GREEN, GREY = "#1f6fb4", "#d9730d", "#2a8a4a", "#888888"
RANK_COLOURS = {"rank_0": BLUE, "rank_1": "#7fb2dd", "rank_2": "#f0b27a", "rank_3_up": ORANGE}


def check() -> None:
    """Raise UserError when matplotlib is missing, before minutes are spent on measuring."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError(
            "--plot needs matplotlib, which is not installed; pip install 'jddtree[eval]'"
        ) from None


def draw(report: "Report", folder: Path, card: str) -> list[Path]:
    """Write all pictures into a folder, made where missing; returns their paths. card: the device that was
    timed.

    Raises UserError when the folder cannot be written.
    """
    check()
    pictures: dict[str, Callable[[Report, Axes], None]] = {
        "acceptance_by_depth": acceptance,
        "accepted_ranks": ranks,
        "tokens_by_budget": tokens,
        "experts_by_rows": experts,
        "reliability": reliability,
        "time_by_stage": lambda report, axes: times(report, axes, card),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_save(picture, report, folder / f"{name}.png") for name, picture in pictures.items()]
    except OSError as error:
        raise UserError(f"--plot {folder} cannot be written ({error.strerror}); check the path") from None


def _save(picture: Callable[["Report", Any], None], report: "Report", path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    picture(report, axes)
    figure.savefig(path, format="png")
    return path


def acceptance(report: "Report", axes: "Axes") -> None:
    """Conditional acceptance by depth, on and off the top-1 chain."""
    lines = {
        "conditional": ("all rounds", BLUE, "o"),
        "on_spine": ("still on the top-1 chain", GREEN, "^"),
        "off_spine": ("no longer on it", ORANGE, "v"),
    }
    for key, (label, colour, marker) in lines.items():
        rows = [row for row in report["depth"] if row[key] is not None]
        axes.plot(
            [r["depth"] for r in rows], [100 * r[key] for r in rows], color=colour, marker=marker, label=label
        )
    for row in report["depth"]:
        axes.annotate(str(row["reached"]), (row["depth"], 2), ha="center", fontsize=8, color=GREY)
    axes.set(
        title="Acceptance by depth",
        xlabel="depth (grey: rounds that came so far)",
        ylabel="accepted, % of rounds that came so far",
        ylim=(0, 102),
    )
    axes.figure.legend(frameon=False, loc="outside lower center", ncols=3)


def ranks(report: "Report", axes: "Axes") -> None:
    """Ranks of the accepted nodes by depth, stacked."""
    rows = [row for row in report["depth"] if row["accepted"]]
    depths, below = [row["depth"] for row in rows], [0.0] * len(rows)
    for key, colour in RANK_COLOURS.items():
        heights = [100 * row[key] for row in rows]
        label = "rank 3 and beyond" if key == "rank_3_up" else key.replace("_", " ")
        axes.bar(depths, heights, bottom=below, color=colour, label=label, width=0.7)
        below = [base + height for base, height in zip(below, heights, strict=True)]
    for row in rows:
        axes.annotate(str(row["accepted"]), (row["depth"], 101), ha="center", fontsize=8, color=GREY)
    axes.set(
        title="Rank of the accepted token in its draft slot",
        xlabel="depth (grey: accepted nodes)",
        ylabel="% of accepted nodes",
        ylim=(0, 107),
        xticks=depths,
    )
    axes.figure.legend(frameon=False, loc="outside right center")


def tokens(report: "Report", axes: "Axes") -> None:
    """Tokens per round against budget: replayed, promised, and the real runs."""
    rows = report["budget"]
    budgets = [row["budget"] for row in rows]
    axes.plot(budgets, [row["promised"] for row in rows], "--", color=GREY, label="promised by the drafter")
    axes.plot(budgets, [row["replayed"] for row in rows], color=BLUE, label="replayed from one run")
    real = report["real"]
    axes.plot([r["budget"] for r in real], [r["real"] for r in real], "o", color=ORANGE, label="real runs")
    axes.set(
        title="Tokens per round by budget",
        xlabel="budget (nodes beside the root)",
        ylabel="tokens per round, bonus included",
        ylim=(0.9, None),
    )
    axes.legend(frameon=False, loc="lower right")


def experts(report: "Report", axes: "Axes") -> None:
    """Distinct experts against rows: the layers' range, their mean, and uniform routing."""
    rows = report["experts"]
    count = [row["rows"] for row in rows]
    low, high = ([extreme(row["by_layer"]) for row in rows] for extreme in (min, max))
    axes.fill_between(
        count, low, high, color=BLUE, alpha=0.18, linewidth=0, label="least and most of a layer"
    )
    axes.plot(count, [row["unique"] for row in rows], color=BLUE, label="measured, mean over layers")
    axes.plot(count, [row["uniform"] for row in rows], "--", color=GREY, label="uniform routing")
    axes.set(
        title="Distinct experts of a layer by rows of the tree",
        xlabel="rows, best first (root included)",
        ylabel="distinct experts",
        ylim=(0, None),
        xlim=(1, None),
    )
    axes.legend(frameon=False, loc="lower right")


def reliability(report: "Report", axes: "Axes") -> None:
    """Observed share against predicted probability, both logarithmic; hollow on the lower edge: no right
    node.
    """
    lowest = 1e-4
    axes.plot([lowest, 1], [lowest, 1], "--", color=GREY, label="as promised", linewidth=1)
    for part, colour, marker in (("spine", GREEN, "^"), ("branches", ORANGE, "v")):
        rows = [row for row in report["reliability"] if row["part"] == part and row["nodes"] >= FEWEST_NODES]
        right, wrong = [row for row in rows if row["observed"]], [row for row in rows if not row["observed"]]
        label = "top-1 chain" if part == "spine" else part
        axes.plot(
            [row["predicted"] for row in right],
            [row["observed"] for row in right],
            color=colour,
            marker=marker,
            label=label,
            linewidth=1.2,
        )
        axes.plot(
            [row["predicted"] for row in wrong], [lowest] * len(wrong), marker, color=colour, fillstyle="none"
        )
    axes.set(
        title=f"Are node probabilities right? (bins of {FEWEST_NODES} nodes and more; hollow: none right)",
        xlabel="predicted: drafter's probability of the whole path",
        ylabel="observed: share of nodes the target agreed with",
        xscale="log",
        yscale="log",
        xlim=(lowest, 1.2),
        ylim=(lowest * 0.8, 1.2),
    )
    axes.legend(frameon=False, loc="upper left")


def times(report: "Report", axes: "Axes", card: str) -> None:
    """Median time of each stage, and of a whole round compiled as one."""
    rows = list(reversed(report["stage"]))
    colours = [GREY if row["share"] is None else BLUE for row in rows]
    bars = axes.barh([row["stage"] for row in rows], [row["ms"] for row in rows], color=colours, height=0.6)
    axes.bar_label(bars, [_time_label(row) for row in rows], padding=4, fontsize=9)
    axes.margins(x=0.3)
    axes.grid(visible=False, axis="y")
    axes.set(title=f"Time of a round by stage\n{card}", xlabel="milliseconds (medians)")


def _time_label(row: dict[str, Any]) -> str:
    share = "" if row["share"] is None else f" ({row['share']:.0%})"
    return f"{row['ms']:.2f} ms{share}"
