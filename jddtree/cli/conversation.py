"""`chat`: a conversation in the terminal, on one slot whose caches keep what was said.

Answers go to stdout, everything else to stderr. A turn prefills only what is new: the scheduler takes over
what the caches hold of the prompt. Ctrl-C stops an answer, Ctrl-D leaves.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from jddtree.api import prepare
from jddtree.cli.ending import interrupts
from jddtree.cli.generate import drafts, read_inputs
from jddtree.cli.opening import open_model
from jddtree.cli.options import (
    ChatOptions,
    ModelOptions,
    OneProcessOptions,
    PromptOptions,
    RequestOptions,
    ShapeOptions,
    budget_of,
)
from jddtree.cli.terminal.rounds_shown import Painter
from jddtree.decoding.engine import Engine
from jddtree.decoding.requests import Request
from jddtree.errors import UserError
from jddtree.loading import Model
from jddtree.serving.scheduler import Scheduler
from jddtree.serving.transcript import Piece, Result, Statistics, joined
from jddtree.serving.user_cache import use_compile_cache
from jddtree.user_files import decoded, reason

HELP = """\
/help          this list
/reset         forget what was said
/system TEXT   what the model is told before everything else; without TEXT, nothing
/budget N      nodes of a tree, or auto
/save FILE     write the messages as JSON, for generate --messages
Ctrl-C stops an answer, Ctrl-D leaves."""
CONTEXT = 4096
FIRST = [{"role": "user", "content": "."}]  # compiles the shapes before anybody has said anything


def run(
    model: ModelOptions,
    request: RequestOptions,
    shapes: ShapeOptions,
    how: OneProcessOptions,
    shown: ChatOptions,
) -> None:
    """Run the command. Raises UserError for whatever cannot be used."""
    inputs = read_inputs(PromptOptions(), request, shapes)
    use_compile_cache(how.compile_cache)
    loaded = open_model(model, shown.quiet, with_drafter=drafts(model, request, shapes), check=how.check)
    options = request.fields() | {
        "thinking": request.thinking,
        "ignore_eos": request.ignore_eos,
        "max_tokens": request.max_tokens,
        "calibration": inputs.calibration,
        "cost": inputs.costs,
        "keep_costs": how.compile_cache,
        "kernels": how.kernels,
    }
    budget = loaded.defaults.budget if request.budget is None else request.budget
    longest = min(CONTEXT, loaded.target.max_position_embeddings)
    capacity = shapes.fields() | {"context": shapes.max_context or longest}
    engine, _ = prepare(loaded, FIRST, capacity=capacity, budget=budget, **options)
    chat = Chat(loaded, engine, options, budget, request.system_prompt, request.stop or [], shown.quiet)
    stopper = Stopper()
    interrupts.hand_over(stopper)
    chat.talk(lines_of_the_user(shown.quiet), stopper)


class Stopper:
    """Ctrl-C: while an answer is written it is only noted, as a round that runs must not be torn apart."""

    def __init__(self) -> None:
        self.answering = False
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        if not self.answering:
            raise KeyboardInterrupt
        self.asked = True


@dataclass
class Chat:
    """A conversation and how it is answered. options: those of `jddtree.prepare` that do not change."""

    model: Model
    engine: Engine
    options: dict[str, Any]
    budget: int | str
    system: str | None
    stop: list[str]
    quiet: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.model, self.engine, reuse=True)

    def talk(self, lines: Iterable[str], stopper: Stopper) -> None:
        """Answer lines until there are no more; what cannot be done is said, and the chat goes on."""
        for line in lines:
            stopper.asked = False
            stopper.answering = True
            try:
                line = decoded(line.encode(errors="surrogateescape"), "the line")
                if line.startswith("/"):
                    self.command(line)
                elif line.strip():
                    self.answer(line, stopper)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            stopper.answering = False

    def command(self, line: str) -> None:
        """Do what a line like "/budget 8" says. Raises UserError for an unknown one and for bad values."""
        name, _, value = line.strip().partition(" ")
        match name:
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                self.messages = []
            case "/system":
                self.system = value or None
            case "/budget":
                self.set_budget(value)
            case "/save" if value:
                self.save(Path(value))
            case _:
                raise UserError(f"{line.strip()!r} is no command of the chat; /help lists them")

    def save(self, path: Path) -> None:
        """Write the messages. Raises UserError when that is not possible."""
        try:
            path.write_text(json.dumps(self.said(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"/save {path} cannot be written: {reason(error)}") from None

    def set_budget(self, value: str) -> None:
        """Nodes of the trees from now on. Raises UserError for what is no budget or does not fit."""
        try:
            budget = budget_of(value)
        except typer.BadParameter:
            shown = value if len(value) < 20 else f"{value[:20]}..."
            raise UserError(f"the budget is {shown!r}, but must be a number of nodes or auto") from None
        self.request(FIRST, budget)
        self.budget = budget

    def said(self) -> list[dict[str, str]]:
        """The messages, the system's first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def request(self, messages: list[dict[str, str]], budget: int | str) -> Request:
        """The request for messages. Raises UserError when it does not fit the engine."""
        _, request = prepare(self.model, messages, engine=self.engine, budget=budget, **self.options)
        self.engine.check(request)
        return request

    def answer(self, text: str, stopper: Stopper) -> None:
        """Say something and write the answer, which Ctrl-C ends early. Raises UserError, and forgets it, when
        it does not fit the context any more.
        """
        asked = {"role": "user", "content": text}
        request = self.request([*self.said(), asked], self.budget)
        result = self.written(request, stopper)
        self.messages += [asked, {"role": "assistant", "content": result.text}]
        if not self.quiet:
            print(summary(result), file=sys.stderr)

    def written(self, request: Request, stopper: Stopper) -> Result:
        """Write an answer to stdout as it comes."""
        painter = Painter(None, sys.stdout.isatty())
        pieces = [Piece("", [], None, Statistics(len(request.prompt)))]
        ticket = self.scheduler.submit(request, self.stop)
        while self.scheduler.busy:
            for _, piece in self.scheduler.step():
                pieces.append(piece)
                print(painter.paint(piece), end="", flush=True)
            if stopper.asked:
                self.scheduler.cancel(ticket)
        print(flush=True)
        return joined(request.prompt, pieces, "interrupted" if stopper.asked else None)


def summary(result: Result) -> str:
    """What an answer took, in a line."""
    one = result.statistics
    rate = one.generated_tokens / max(one.prefill_s + one.decode_s, 1e-9)
    return (
        f"[{one.generated_tokens} tokens, {rate:.1f} tokens/s, {one.acceptance_length:.2f} tokens per round, "
        f"{one.cached_tokens} of {one.prompt_tokens} prompt tokens from the caches, {result.finish_reason}]"
    )


def lines_of_the_user(quiet: bool) -> Iterable[str]:
    """Lines of standard input, edited and with a history where it is a terminal; Ctrl-C empties a line."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  (input() edits lines once it is there)
    if terminal and not quiet:
        print("Say something, or /help.", file=sys.stderr)
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        except EOFError:
            return
        if not terminal and not line:
            return
        yield line.rstrip("\n")
