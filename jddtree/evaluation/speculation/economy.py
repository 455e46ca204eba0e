"""Pictures of what trees are worth: tokens per second against node count by cost curve, and calibration.

One SVG per question, drawn without a display and without global state; matplotlib is imported on use.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jddtree.errors import UserError
from jddtree.evaluation.speculation.plots import BLUE, FEWEST_NODES, GREEN, GREY, ORANGE, check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
COLOURS = (BLUE, ORANGE, GREEN, GREY)
PANEL, COLUMNS = (3.4, 2.6), 3  # inches
LOWEST = 1e-3  # of the calibration picture


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write auto_budget.svg, from rows of `bench auto`, into a folder. Raises UserError when it cannot be
    written.
    """
    curves = list(dict.fromkeys(row["curve"] for row in rows if row["table"] == "auto"))
    figure, panels = _figure(len(curves))
    for axes, curve in zip(panels, curves, strict=False):
        by_budget(axes, curve, [row for row in rows if row["curve"] == curve])
    panels[0].legend(frameon=False, fontsize=7)
    return [_save(figure, folder / "auto_budget.svg")]


def draw_calibration(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write calibration.svg, from rows of `calibrate`, into a folder. Raises UserError when it cannot be
    written.
    """
    found = [row for row in rows if row["table"] == "reliability"]
    modes = list(dict.fromkeys(row["mode"] for row in found))
    figure, panels = _figure(len(modes))
    for axes, mode in zip(panels, modes, strict=False):
        reliability(axes, mode, [row for row in found if row["mode"] == mode])
    panels[0].legend(frameon=False, fontsize=7)
    return [_save(figure, folder / "calibration.svg")]


def by_budget(axes: "Axes", curve: str, rows: Sequence[Row]) -> None:
    """Tokens per second of fixed trees against their nodes, plain decoding at 0, and auto at its mean count,
    as a star; a colour per temperature, relative to plain decoding.
    """
    heats = list(dict.fromkeys(row["temperature"] for row in rows if row["table"] == "auto"))
    for heat, colour in zip(heats, COLOURS, strict=False):
        fixed = [row for row in rows if row["table"] == "fixed" and row["temperature"] == heat]
        plain = next(row["tokens_per_s"] for row in fixed if row["choice"] == "plain decoding")
        trees = [row for row in fixed if row["choice"] != "chain"]
        axes.plot(
            [row["nodes"] for row in trees],
            [row["tokens_per_s"] / plain for row in trees],
            color=colour,
            marker=".",
            linewidth=1,
            label=f"trees, T = {heat:g}",
        )
        chain = next((row for row in fixed if row["choice"] == "chain"), None)
        if chain is not None:
            axes.plot([chain["nodes"]], [chain["tokens_per_s"] / plain], "s", color=colour, fillstyle="none")
        (auto,) = (row for row in rows if row["table"] == "auto" and row["temperature"] == heat)
        axes.plot(
            [auto["nodes_per_round"]], [auto["auto_tokens_per_s"] / plain], "*", color=colour, markersize=12
        )
    axes.set_xscale("symlog", linthresh=2)
    axes.minorticks_off()
    axes.set(title=curve, xlabel="nodes (square: chain, star: auto)", ylabel="speed, plain decoding = 1")
    axes.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])


def reliability(axes: "Axes", mode: str, rows: Sequence[Row]) -> None:
    """Observed share of accepted nodes against the chance that the scores give, and that calibration
    gives.
    """
    axes.plot([LOWEST, 1], [LOWEST, 1], "--", color=GREY, linewidth=1, label="as promised")
    for kind, colour in (("by scores", ORANGE), ("calibrated", BLUE)):
        shown = [
            row for row in rows if row["kind"] == kind and row["nodes"] >= FEWEST_NODES and row["observed"]
        ]
        axes.plot(
            [row["predicted"] for row in shown],
            [row["observed"] for row in shown],
            color=colour,
            marker=".",
            linewidth=1,
            label=kind,
        )
    axes.set(
        title=mode,
        xlabel="chance",
        ylabel="share accepted",
        xscale="log",
        yscale="log",
        xlim=(LOWEST, 1.2),
        ylim=(LOWEST, 1.2),
    )
    axes.minorticks_off()


def _figure(panels: int) -> tuple[Any, list["Axes"]]:
    """A figure and that many panels of it, in rows of three"""
    check()
    from matplotlib.figure import Figure

    columns = min(panels, COLUMNS)
    lines = -(-panels // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for axes in grid[panels:]:
        axes.set_visible(False)
    for axes in grid:
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[:panels]


def _save(figure: Any, path: Path) -> Path:
    """Text stays text, which keeps files small; without a date the same picture is the same file"""
    from matplotlib import rc_context

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "jddtree", "font.sans-serif": ["DejaVu Sans"]}
        ):
            figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise UserError(
            f"--plot {path.parent} cannot be written ({error.strerror}); check the path"
        ) from None
    return path
