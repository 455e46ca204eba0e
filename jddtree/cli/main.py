"""The command line: parses before JAX is imported, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 something given cannot be used (`UserError`), 2 wrong usage, 130 Ctrl-C. A closed pipe ends the
command silently, with 1.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from jddtree.errors import UserError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Kimi K2.6 with DDTree speculative decoding in JAX. Without --target the bundled micro model runs.",
)  # fmt: skip

bench = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure: a table, then one JSON object as the last line."
)
app.add_typer(bench, name="bench")

Target = Annotated[
    Path | None,
    typer.Option(
        "--target",
        help="Folder of a Kimi K2.6 checkpoint, or of a store made by convert. Default: the bundled micro model.",
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="FOLDER|ngram",
        help="Folder of a drafter for the target, or ngram: look up the text's own earlier words, without weights.",
    ),
]
Method = Literal["ar", "chain", "tree", "dflash", "ddtree"]  # the last two are other names of chain and tree
Mesh = Annotated[int | None, typer.Option("--mesh", help="Devices to split the model over. Default: all accelerators.")]
ExpertLayout = Annotated[
    Literal["tensor", "expert"], typer.Option(help="On each rank a slice of every expert, or whole experts.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"], typer.Option(help="Compute type; auto is bfloat16 on an accelerator.")
]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Let the model think first. Default: the model's own."),
]
Check = Annotated[bool, typer.Option("--check", help="Compare a store's files with their checksums before loading.")]


def _budget(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number of nodes nor auto") from None


Budget = Annotated[
    str,
    typer.Option(
        parser=_budget, metavar="N|auto", help="Nodes of a tree, the root not counted; auto: as many as pay, by --cost."
    ),
]
Cost = Annotated[
    Path | None,
    typer.Option(help="Cost curve for --budget auto (docs/economics.md). Default: measured once and cached."),
]
Calibrated = Annotated[
    Path | None, typer.Option("--calibration", help="What the drafter's scores are worth, from calibrate.")
]

TopKCap = Annotated[int | None, typer.Option(help="Most candidates per draft slot. Default: as many as nodes.")]
Spine = Annotated[bool, typer.Option("--spine", help="Put the top-1 chain into every tree first.")]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", help="0 takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that reach this sum.")]
Coupling = Annotated[
    bool,
    typer.Option("--coupling/--no-coupling", help="Above temperature 0, draft with the target's own sampling noise."),
]
Tau = Annotated[
    float | None,
    typer.Option(help="How much the coupled drafter's scores are flattened. Default: 1 / temperature, at least 1."),
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling noise.")]
Capacity = Annotated[
    int | None, typer.Option(help="Compiled rows of the verify pass, root included. Default: fits the budget.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the model's stop tokens.")]
SystemPrompt = Annotated[str | None, typer.Option(help="System message put before the prompt.")]
PrefillChunk = Annotated[int | None, typer.Option(help="Prompt tokens per prefill call.")]
RoundsPerDispatch = Annotated[int | None, typer.Option(help="Rounds between two looks at the result.")]
Coordinator = Annotated[
    str | None, typer.Option(help="HOST:PORT of process 0, when several processes run the model together.")
]
Processes = Annotated[int | None, typer.Option(help="How many processes there are.")]
ProcessId = Annotated[int | None, typer.Option(help="Which of them this one is, from 0.")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and answer that the cache holds.")]
Kernels = Annotated[
    Literal["auto", "xla", "pallas"], typer.Option(help="Kernels; auto is pallas on a GPU and xla elsewhere.")
]
Preset = Annotated[Literal["kimi-k2.6", "tiny"], typer.Option(help="Which model, with random weights.")]
World = Annotated[int, typer.Option(help="Ranks that share the model; one of them runs, or all with --mesh.")]
ExpertRouting = Annotated[str, typer.Option(help="How rows choose experts: uniform, zipf, trace; several with commas.")]
Layers = Annotated[int | None, typer.Option(help="Only so many of the target's layers.")]
Profile = Annotated[bool, typer.Option("--profile/--no-profile", help="Also time each kernel, by CUPTI.")]
Output = Annotated[Path | None, typer.Option("--output", help="Also write the rows to this results file.")]
CompileCache = Annotated[
    bool,
    typer.Option("--compile-cache/--no-compile-cache", help="Keep compiled programs in the user's cache folder."),
]


def _version(value: bool) -> None:
    if value:
        from jddtree.cli.generate import version_line

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and the device.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command(help="Write text. The answer goes to stdout as rounds finish, progress and statistics to stderr.")
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt; - reads standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    prompt_ids: Annotated[
        Path | None, typer.Option(help="JSON file with a list of token ids, used as they are.")
    ] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file with a list of chat messages.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without the chat template.")] = False,
    system_prompt: SystemPrompt = None,
    thinking: Thinking = None,
    target: Target = None,
    draft: Draft = None,
    check: Check = False,
    method: Annotated[
        Method,
        typer.Option(help="Plain decoding, the drafter's top-1 chain, or a best-first tree. The text is the same."),
    ] = "tree",
    budget: Budget = "auto",
    cost: Cost = None,
    calibration: Calibrated = None,
    top_k_cap: TopKCap = None,
    spine: Spine = False,
    capacity: Capacity = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "--max-new-tokens", help="Most tokens to write.")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    coupling: Coupling = True,
    tau: Tau = None,
    seed: Seed = 0,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    dtype: Dtype = "auto",
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    rounds_per_dispatch: RoundsPerDispatch = None,
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    coordinator: Coordinator = None,
    processes: Processes = None,
    process_id: ProcessId = None,
    kernels: Kernels = "auto",
    compile_cache: CompileCache = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no statistics.")] = False,
) -> None:
    """See the help of the command."""
    settings = dict(locals())
    from jddtree.cli.generate import run

    run(**settings)


@app.command(
    help="Say what a checkpoint folder holds and how much memory it needs, from config.json and the index alone."
)
def inspect(
    directory: Annotated[Path, typer.Argument(help="Folder of a target or a drafter.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """See the help of the command."""
    from jddtree.cli.inspect import run

    run(directory, json_output)


@app.command(help="Turn Hugging Face folders into a store that loads on any number of devices; run again, it resumes.")
def convert(
    target: Annotated[Path, typer.Option("--target", help="Folder of a Kimi K2.6 checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the store: new, empty, or an unfinished conversion.")],
    draft: Draft = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check all checksums and compare samples with the source.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, also when the store is complete.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """See the help of the command."""
    from jddtree.cli.convert import run

    run(target, draft, out, dry_run=dry_run, verify=verify, force=force, json_output=json_output, quiet=quiet)


@app.command(help="Fit what the drafter's scores are worth to recorded rounds; --budget auto goes by it.")
def calibrate(
    output: Annotated[Path, typer.Option("--output", help="File to write, for --calibration.")],
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON list of texts or id lists. Default: bundled ones.")] = None,
    budget: Annotated[int, typer.Option(help="Nodes of the recorded trees.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 97,
    temperatures: Annotated[str, typer.Option(help="Temperatures of sampled texts.")] = "1,0.6",
    dtype: Dtype = "auto",
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture into this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """See the help of the command."""
    settings = dict(locals())
    from jddtree.cli.calibrate import run

    run(**settings)


@app.command(
    "eval",
    help="Score tasks, compare methods, check recorded outputs, measure perplexity. Run again, it resumes.",
)
def evaluate(
    tasks: Annotated[
        str | None,
        typer.Option(help="Task names with commas, as in docs/evaluation.md, or files of prompts (FILE.jsonl)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first examples of each task.")] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Folder of results and samples; an unfinished run there goes on.")
    ] = Path("eval_results"),
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Most tokens of an answer whose example sets none.")
    ] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    coupling: Coupling = True,
    tau: Tau = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 8,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the programs that the model writes; see docs/evaluation.md.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option(help="Instead of scoring, run the prompts by these methods, like ar,chain,tree.")
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(help="Check the model against recorded outputs, like vllm_golden.json.")
    ] = None,
    perplexity: Annotated[Path | None, typer.Option(help="Measure perplexity on a text file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also record rounds on the prompts of --tasks; speculation.json and pictures go here."),
    ] = None,
    thinking: Thinking = None,
    system_prompt: SystemPrompt = None,
    target: Target = None,
    draft: Draft = None,
    check: Check = False,
    method: Annotated[Method, typer.Option(help="How to decode; the text is the same.")] = "tree",
    budget: Budget = "32",
    cost: Cost = None,
    calibration: Calibrated = None,
    top_k_cap: TopKCap = None,
    spine: Spine = False,
    capacity: Capacity = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    dtype: Dtype = "auto",
    max_context: MaxContext = None,
    prefill_chunk: PrefillChunk = None,
    rounds_per_dispatch: RoundsPerDispatch = None,
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    coordinator: Coordinator = None,
    processes: Processes = None,
    process_id: ProcessId = None,
    kernels: Kernels = "auto",
    compile_cache: CompileCache = True,
    json_output: Annotated[
        bool, typer.Option("--json", help="After the tables, print one JSON object as the last line.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int:
    """See the help of the command."""
    settings = dict(locals())
    from jddtree.cli.eval import run

    return run(**settings)


@bench.command("generate", help="Rounds, acceptance length and speed of ar, chain and tree over a set of prompts.")
def bench_generate(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of texts or id lists. Default: 12 bundled ones.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Tree sizes to measure.")] = "8,16,32,64",
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 97,
    dtype: Dtype = "auto",
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    output: Output = None,
) -> None:
    """See the help of the command."""
    from jddtree.cli.bench import run_generate

    run_generate(target, draft, prompts, budgets, max_tokens, dtype, mesh, expert_layout, output)


@bench.command("kernels", help="Time the GPU kernels against what the card can do, and check them. Needs a GPU.")
def bench_kernels(
    world: Annotated[int, typer.Option(help="GPUs that share the model by tensor parallelism; one of them runs.")] = 8,
    tokens: Annotated[
        str | None, typer.Option(help="Token rows per call.", show_default="1,9,17,33,65,128,512")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Committed keys that attention reads.", show_default="2048,16384,131072")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Query heads of the GPU.", show_default="those of one of --world, and 64")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, skewed or a JSON list of rows of expert numbers; several with commas.")
    ] = "uniform",
    kernels: Annotated[str, typer.Option(help="Which kernels.")] = "expert,attention",
    check: Annotated[bool, typer.Option("--check", help="Only check results; without a GPU at tiny sizes.")] = False,
    peers: Annotated[
        Path | None, typer.Option(help="JSON list of {kernel, tokens, context, heads, peer, time_us} to compare with.")
    ] = None,
    output: Output = None,
) -> None:
    """See the help of the command."""
    from jddtree.cli.bench_kernels import run

    run(world, tokens, context, heads, routing, kernels, check, peers, output)


@bench.command(
    "step",
    help="The whole step of one rank of Kimi K2.6 with random weights, against its memory floor: verify, draft, build, "
    "walk, commit, round, prefill. Needs an H200 (about 6 minutes), or --preset tiny.",
)
def bench_step(
    preset: Preset = "kimi-k2.6",
    world: World = 8,
    tokens: Annotated[str | None, typer.Option(help="Rows of the tree.", show_default="1,9,17,33,65")] = None,
    context: Annotated[
        str | None, typer.Option(help="Committed tokens and rows.", show_default="4096,32768,131072")
    ] = None,
    routing: ExpertRouting = "uniform",
    stages: Annotated[
        str | None, typer.Option(help="verify,draft,build,walk,commit,round,prefill,repeat,sweep.", show_default="all")
    ] = None,
    layers: Layers = None,
    experts: Annotated[int | None, typer.Option(help="Only so many routed experts a layer.")] = None,
    mesh: Annotated[int | None, typer.Option(help="Run all ranks on so many devices of this host.")] = None,
    expert_layout: Annotated[str, typer.Option(help="On a mesh: tensor, expert, or both with a comma.")] = "tensor",
    rank: Annotated[
        Path | None, typer.Option(help="Results file of one of these ranks alone, to compare a mesh with.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Compute type.")] = "bfloat16",
    kernels: Kernels = "auto",
    seed: Annotated[int, typer.Option(help="Seed of all random data.")] = 0,
    threads: Annotated[int, typer.Option(help="Programs compiled at a time.")] = 8,
    profile: Profile = True,
    peers: Annotated[
        Path | None, typer.Option(help="JSON list of {stage, tokens, context, peer, time_ms} to compare with.")
    ] = None,
    dump: Annotated[Path | None, typer.Option(help="Folder for the optimised HLO and kernels of each stage.")] = None,
    output: Output = None,
) -> int:
    """See the help of the command."""
    options = dict(locals())
    from jddtree.cli.bench_step import run_step

    return run_step(options)


@bench.command(
    "round", help="A round of one rank of Kimi K2.6 stage by stage, and what waiting for the host takes; as bench step."
)
def bench_round(
    preset: Preset = "kimi-k2.6",
    world: World = 8,
    tokens: Annotated[str, typer.Option(help="Rows of the tree.")] = "33",
    context: Annotated[str, typer.Option(help="Committed tokens and rows.")] = "4096",
    routing: ExpertRouting = "uniform",
    layers: Layers = None,
    profile: Profile = True,
    output: Output = None,
) -> int:
    """See the help of the command."""
    options = dict(locals())
    from jddtree.cli.bench_step import ROUND_STAGES, run_step

    return run_step({**options, "stages": ROUND_STAGES})


@bench.command(
    "decode", help="The micro model with 1 to 16 rounds per dispatch: tokens per second, acceptance, gaps in between."
)
def bench_decode(
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of lists of token ids. Default: bundled ones.")
    ] = None,
    rounds: Annotated[str, typer.Option(help="Rounds per dispatch.")] = "1,2,4,8,16",
    budget: Annotated[int, typer.Option(help="Nodes a round may use.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 200,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Compute type.")] = "bfloat16",
    mesh: Annotated[int | None, typer.Option(help="Split over so many devices, compared with one.")] = None,
    output: Output = None,
) -> int:
    """See the help of the command."""
    options = dict(locals())
    from jddtree.cli.bench_step import run_decode

    return run_decode(options)


@bench.command("mesh", help="What splitting over devices costs: time per sum, steps and tokens on one and on several.")
def bench_mesh(
    preset: Annotated[
        str | None,
        typer.Option(
            help="Models: micro, k2.6-4layer or tiny, several with commas.",
            show_default="micro,k2.6-4layer on GPUs, else tiny",
        ),
    ] = None,
    mesh: Mesh = None,
    parts: Annotated[str | None, typer.Option(help="sum,low_rank,tokens,step,kernels; default all.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the rows to this results file.")] = None,
) -> None:
    """See the help of the command."""
    from jddtree.benchmarks.mesh import run

    run(preset, mesh, parts, output)


@bench.command("speculation", help="What the trees are worth: acceptance, ranks, calibration, experts, budgets, times.")
def bench_speculation(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of texts or id lists. Default: 12 bundled ones.")
    ] = None,
    budget: Annotated[int, typer.Option(help="Nodes of the recorded trees; smaller budgets are replayed.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 97,
    dtype: Dtype = "auto",
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw pictures into this folder.")] = None,
    output: Output = None,
) -> None:
    """See the help of the command."""
    from jddtree.cli.speculation import run

    run(target, draft, prompts, budget, max_tokens, dtype, mesh, expert_layout, json_output, plot, output)


@bench.command("coupling", help="Tokens per round with and without drafting by the target's own sampling noise.")
def bench_coupling(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of texts or id lists. Default: 12 bundled ones.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Temperatures above 0.")] = "1,0.6",
    budgets: Annotated[str, typer.Option(help="Tree sizes to measure, beside the chain.")] = "8,32,64",
    seeds: Annotated[int, typer.Option(help="Texts per prompt and temperature.")] = 8,
    tau_temperatures: Annotated[str, typer.Option(help="Temperatures of the sweep of tau.")] = "1.4,1,0.6,0.3",
    tau_seeds: Annotated[int, typer.Option(help="Texts per prompt in the sweep of tau; 0 leaves it out.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 97,
    top_p: TopP = 1.0,
    dtype: Dtype = "auto",
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    output: Annotated[Path | None, typer.Option(help="Also write the rows to this results file.")] = None,
) -> None:
    """See the help of the command."""
    settings = dict(locals())
    from jddtree.cli.bench_coupling import run

    run(**settings)


@bench.command("auto", help="Node counts chosen round by round against every fixed count, by cost curves.")
def bench_auto(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of texts or id lists. Default: 24 held-out places in source files.")
    ] = None,
    cost: Annotated[
        list[Path] | None, typer.Option(help="Cost curves, beside this machine's. Default: those of the package.")
    ] = None,
    calibration: Calibrated = None,
    budgets: Annotated[
        str, typer.Option(help="Fixed tree sizes; the largest is the most that auto may use.")
    ] = "1,2,3,4,6,8,16,32,64",
    temperatures: Annotated[str, typer.Option(help="Temperatures; 0 is greedy.")] = "0,1,0.6",
    max_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 97,
    batch: Annotated[int, typer.Option(help="Texts that fixed choices decode together; no result depends on it.")] = 12,
    dtype: Dtype = "auto",
    mesh: Mesh = None,
    expert_layout: ExpertLayout = "tensor",
    plot: Annotated[Path | None, typer.Option(help="Also draw pictures into this folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the rows to this results file.")] = None,
) -> None:
    """See the help of the command."""
    settings = dict(locals())
    from jddtree.cli.bench_auto import run

    run(**settings)


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(guarded(lambda: app(standalone_mode=False)))


def tell_others(message: str) -> None:
    """Pass a failure on to the other processes of this run, if JAX was started at all."""
    if "jax" in sys.modules:
        from jddtree.parallel.processes import fail

        fail(message)


def guarded(command: Callable[[], object]) -> int:
    """Run a command and return the exit code that its end means; see the module."""
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        tell_others(str(error))
        return 1
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Usage errors of the parser, whose classes Typer keeps private, know how to show themselves.
        if show := getattr(error, "show", None):
            show()
            return getattr(error, "exit_code", 2)
        raise
