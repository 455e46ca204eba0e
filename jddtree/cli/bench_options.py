"""The options of the benchmarks of decoding and of the kernels, each list once."""

from dataclasses import dataclass
from pathlib import Path

from jddtree.cli.options import MeasureOptions
from jddtree.command import option


@dataclass(frozen=True)
class MethodsOptions(MeasureOptions):
    """Of `bench generate`."""

    budgets: str = option("8,16,32,64", "Tree sizes to measure.")


@dataclass(frozen=True)
class SpeculationOptions(MeasureOptions):
    """Of `bench speculation`."""

    budget: int = option(64, "Nodes of the recorded trees; smaller budgets are replayed.")
    json_output: bool = option(False, "Print one JSON object instead of tables.", "--json")
    plot: Path | None = option(None, "Also draw pictures into this folder.")


@dataclass(frozen=True)
class CouplingOptions(MeasureOptions):
    """Of `bench coupling`."""

    temperatures: str = option("1,0.6", "Temperatures above 0.")
    budgets: str = option("8,32,64", "Tree sizes to measure, beside the chain.")
    seeds: int = option(8, "Texts per prompt and temperature.")
    tau_temperatures: str = option("1.4,1,0.6,0.3", "Temperatures of the sweep of tau.")
    tau_seeds: int = option(2, "Texts per prompt in the sweep of tau; 0 leaves it out.")
    top_p: float = option(1.0, "Sample from the most probable tokens that reach this sum.")


@dataclass(frozen=True)
class AutoOptions(MeasureOptions):
    """Of `bench auto`."""

    cost: list[Path] | None = option(
        None, "Cost curves, beside this machine's. Default: those of the package."
    )
    calibration: Path | None = option(None, "What the drafter's scores are worth, from calibrate.")
    budgets: str = option(
        "1,2,3,4,6,8,16,32,64", "Fixed tree sizes; the largest is the most that auto may use."
    )
    temperatures: str = option("0,1,0.6", "Temperatures; 0 is greedy.")
    batch: int = option(12, "Texts that fixed choices decode together; no result depends on it.")
    plot: Path | None = option(None, "Also draw pictures into this folder.")


@dataclass(frozen=True)
class StartOptions:
    """Of `bench start`."""

    runs: int = option(5, "Cold starts, and as many warm ones.")
    output: Path | None = option(None, "Also write the rows to this results file.", "--output")


@dataclass(frozen=True)
class KernelOptions:
    """Of `bench kernels`."""

    world: int = option(8, "GPUs that share the model by tensor parallelism; one of them runs.")
    tokens: str | None = option(None, "Token rows per call.", show_default="1,9,17,33,65,128,512")
    context: str | None = option(
        None, "Committed keys that attention reads.", show_default="2048,16384,131072"
    )
    heads: str | None = option(
        None, "Query heads of the GPU.", show_default="those of one of --world, and 64"
    )
    routing: str = option(
        "uniform", "uniform, skewed or a JSON list of rows of expert numbers; several with commas."
    )
    kernels: str = option("expert,attention", "Which kernels.")
    check: bool = option(False, "Only check results; without a GPU at tiny sizes.", "--check")
    peers: Path | None = option(
        None, "Results of jddtree.benchmarks.peers kernels, or a folder of vLLM's kernels."
    )
    output: Path | None = option(None, "Also write the rows to this results file.", "--output")
