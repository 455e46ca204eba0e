"""The options that commands share, each list once: which model, which request, which compiled shapes, what to
show.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from jddtree.command import argument, option

Dtype = Literal["auto", "float32", "bfloat16"]
Method = Literal["ar", "chain", "tree", "dflash", "ddtree"]


def budget_of(text: str) -> int | str:
    """A number of nodes, or "auto"."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number of nodes nor auto") from None


BUDGET: dict[str, Any] = {"parser": budget_of, "metavar": "N|auto"}


@dataclass(frozen=True)
class ModelOptions:
    """Which target and drafter, and the devices that they run on."""

    target: Path | None = option(
        None,
        "Folder of a Kimi K2.6 checkpoint, or of a store made by convert. Default: the bundled micro model.",
    )
    draft: Path | None = option(
        None,
        "Folder of a drafter for the target, or ngram: look up the text's own earlier words, without "
        "weights.",
        metavar="FOLDER|ngram",
    )
    dtype: Dtype = option("auto", "Compute type; auto is bfloat16 on an accelerator.")
    mesh: int | None = option(None, "Devices to split the model over. Default: all accelerators.")
    expert_layout: Literal["tensor", "expert"] = option(
        "tensor", "On each rank a slice of every expert, or whole experts."
    )


@dataclass(frozen=True)
class OneProcessOptions:
    """How the program runs, whatever it is asked, where one process runs the model."""

    check: bool = option(False, "Compare a store's files with their checksums before loading.", "--check")
    kernels: Literal["auto", "xla", "triton", "mosaic"] = option(
        "auto", "Kernels: auto is the best for this device, xla the plain twins, mosaic is for Hopper."
    )
    compile_cache: bool = option(
        True, "Keep compiled programs in the user's cache folder.", "--compile-cache/--no-compile-cache"
    )


@dataclass(frozen=True)
class RunOptions(OneProcessOptions):
    """How the program runs where several processes may share the model."""

    coordinator: str | None = option(
        None, "HOST:PORT of process 0, when several processes run the model together."
    )
    processes: int | None = option(None, "How many processes there are.")
    process_id: int | None = option(None, "Which of them this one is, from 0.")


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for: how to draft, how to choose tokens, where to end."""

    method: Method = option(
        "tree",
        "Plain decoding, the drafter's top-1 chain (or: dflash), or a best-first tree (ddtree). The text "
        "is the same.",
    )
    budget: Any = option(
        None,
        "Nodes of a tree, the root not counted; auto: as many as pay, by --cost. Default: auto, and 15 "
        "for the bundled model.",
        **BUDGET,
    )
    cost: Path | None = option(
        None, "Cost curve for --budget auto (docs/economics.md). Default: measured once and cached."
    )
    calibration: Path | None = option(None, "What the drafter's scores are worth, from calibrate.")
    top_k_cap: int | None = option(None, "Most candidates per draft slot. Default: as many as nodes.")
    spine: bool = option(False, "Put the top-1 chain into every tree first.", "--spine")
    max_tokens: int = option(256, "Most tokens to write.", "--max-tokens", "--max-new-tokens")
    temperature: float = option(0.0, "0 takes the most probable token.", "--temperature", "--temp")
    top_p: float = option(1.0, "Sample from the most probable tokens that reach this sum.")
    coupling: bool = option(
        True, "Above temperature 0, draft with the target's own sampling noise.", "--coupling/--no-coupling"
    )
    tau: float | None = option(
        None, "How much the coupled drafter's scores are flattened. Default: 1 / temperature, at least 1."
    )
    seed: int = option(0, "Seed of the sampling noise.")
    stop: list[str] | None = option(None, "Text that ends the answer; may be given several times.")
    ignore_eos: bool = option(False, "Do not end at the model's stop tokens.", "--ignore-eos")
    system_prompt: str | None = option(None, "System message put before the prompt.")
    thinking: bool | None = option(
        None, "Let the model think first. Default: the model's own.", "--thinking/--no-thinking"
    )

    def fields(self) -> dict[str, Any]:
        """The fields of a `Request` that these options name, but for the budget and max_tokens."""
        names = ("method", "top_k_cap", "spine", "temperature", "top_p", "coupling", "tau", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ShapeOptions:
    """The compiled shapes; those left out follow from the request."""

    capacity: int | None = option(
        None, "Compiled rows of the verify pass, root included. Default: fits the budget."
    )
    max_context: int | None = option(None, "Tokens of prompt and answer that the cache holds.")
    prefill_chunk: int | None = option(None, "Prompt tokens per prefill call.")
    rounds_per_dispatch: int | None = option(None, "Rounds between two looks at the result.")

    def fields(self) -> dict[str, int | None]:
        """The fields of a `Capacity`; None where they follow from the request."""
        return {
            "rows": self.capacity,
            "context": self.max_context,
            "chunk": self.prefill_chunk,
            "rounds": self.rounds_per_dispatch,
        }


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompt comes from."""

    prompt: str | None = option(None, "The prompt; - reads standard input.", "--prompt", "-p")
    prompt_file: Path | None = option(None, "Read the prompt from a file.")
    prompt_ids: Path | None = option(None, "JSON file with a list of token ids, used as they are.")
    messages: Path | None = option(None, "JSON file with a list of chat messages.")
    raw: bool = option(False, "Continue the prompt itself, without the chat template.", "--raw")


@dataclass(frozen=True)
class GenerateOptions:
    """How the text is shown."""

    show_rounds: bool | None = option(
        None,
        "Colour the text by round. Default: on a terminal.",
        "--show-rounds/--no-show-rounds",
    )


@dataclass(frozen=True)
class ChatOptions:
    """What a conversation shows beside the answers."""

    quiet: bool = option(False, "No progress and no statistics.", "--quiet", "-q")


@dataclass(frozen=True)
class QuietOptions:
    """What is shown beside the result."""

    json_output: bool = option(False, "Print one JSON object.", "--json")
    quiet: bool = option(False, "No progress and no statistics.", "--quiet", "-q")


@dataclass(frozen=True)
class EvalOptions:
    """What `eval` measures."""

    tasks: str | None = option(
        None, "Task names with commas, as in docs/evaluation.md, or files of prompts (FILE.jsonl)."
    )
    limit: int | None = option(None, "Only the first examples of each task.")
    output: Path = option(
        Path("eval_results"), "Folder of results and samples; an unfinished run there goes on.", "--output"
    )
    batch: int = option(8, "Sequences decoded together.")
    allow_code: bool = option(
        False, "Run the programs that the model writes; see docs/evaluation.md.", "--allow-code"
    )
    compare: str | None = option(
        None, "Instead of scoring, run the prompts by these methods, like ar,chain,tree."
    )
    golden: Path | None = option(None, "Check the model against recorded outputs, like vllm_golden.json.")
    perplexity: Path | None = option(None, "Measure perplexity on a text file.")
    plot: Path | None = option(
        None, "Also record rounds on the prompts of --tasks; speculation.json and pictures go here."
    )


@dataclass(frozen=True)
class EvalRequestOptions(RequestOptions):
    """A request of `eval`: a fixed budget, so that rounds of two machines can be compared."""

    budget: Any = option(32, "Nodes of a tree, the root not counted; auto: as many as pay.", **BUDGET)


@dataclass(frozen=True)
class MeasureOptions:
    """What benchmarks of decoding run, and where the rows go."""

    prompts: Path | None = option(None, "JSON list of texts or id lists. Default: bundled ones.")
    max_tokens: int = option(97, "Tokens per prompt.")
    output: Path | None = option(None, "Also write the rows to this results file.", "--output")


@dataclass(frozen=True)
class InspectOptions:
    """Of `inspect`."""

    directory: Path = argument("Folder of a target or a drafter.")
    json_output: bool = option(False, "Print one JSON object.", "--json")


@dataclass(frozen=True)
class ConvertOptions:
    """Of `convert`."""

    target: Path = option(MISSING, "Folder of a Kimi K2.6 checkpoint.", "--target")
    out: Path = option(MISSING, "Folder of the store: new, empty, or an unfinished conversion.", "--out")
    draft: Path | None = option(None, "Folder of a drafter for the target.")
    dry_run: bool = option(False, "Only say what would be done.", "--dry-run")
    verify: bool = option(False, "Check all checksums and compare samples with the source.", "--verify")
    force: bool = option(False, "Start over, also when the store is complete.", "--force")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(MeasureOptions):
    """Of `calibrate`."""

    output: Path = option(MISSING, "File to write, for --calibration.", "--output")
    budget: int = option(64, "Nodes of the recorded trees.")
    temperatures: str = option("1,0.6", "Temperatures of sampled texts.")
    plot: Path | None = option(None, "Also draw a picture into this folder.")
    quiet: bool = option(False, "No progress.", "--quiet", "-q")


@dataclass(frozen=True)
class TraceOptions:
    """Of `trace`."""

    output: Path = option(MISSING, "File of the picture, in SVG.", "--output")
    prompt: str | None = option(None, "The prompt. Default: the model's own.", "--prompt", "-p")
    raw: bool = option(False, "Continue the prompt itself, without the chat template.", "--raw")
    budget: int = option(15, "Nodes of the tree.")
    max_tokens: int = option(64, "Tokens to write; the most telling round of them is drawn.")
