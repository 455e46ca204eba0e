"""From the examples of a task to requests, and to the smallest engine that can run them.

Contract: an example's sequence number is its place in the task, so its noise depends on nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jddtree.api import prompt_ids
from jddtree.decoding.engine import Engine, Request, check_program, check_request
from jddtree.decoding.generate import compile_engine, default_capacity, program_for
from jddtree.decoding.program import Program
from jddtree.errors import UserError
from jddtree.evaluation.slots import Job
from jddtree.evaluation.task import Example, Task
from jddtree.loading import Model


@dataclass(frozen=True)
class Settings:
    """How tasks are asked; together with the tasks it decides every answer.

    request: fields of `Request` (method, budget, temperature, top_p, seed ...). max_tokens: for examples without their
    own. thinking: None is the model's default. limit: first examples of each task, None for all. batch: sequences
    decoded together. context: tokens of a sequence, None fits the longest. kernels: None for the best. origin: what
    else answers depend on, like the checkpoint. stop: strings that end any answer, beside those of its example.
    ignore_eos: do not end at the model's stop tokens. system_prompt: put before prompts that are not raw. shapes: other
    fields of `Capacity` to set, None leaves them. tune: called with each engine once it is compiled, to set what it
    plans with; no answer depends on it.
    """

    request: dict[str, Any]
    max_tokens: int = 256
    thinking: bool | None = None
    limit: int | None = None
    batch: int = 8
    context: int | None = None
    kernels: str | None = None
    origin: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    system_prompt: str | None = None
    shapes: dict[str, int | None] = field(default_factory=dict)
    tune: Callable[[Engine], None] | None = None

    @property
    def capacity(self) -> dict[str, int | None]:
        """Fields of `Capacity` that are given, but for the number of sequences."""
        return {**self.shapes, "context": self.context}

    def record(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """The settings as files name them."""
        names = {"tasks": [task.name for task in tasks], "limit": self.limit, "batch_size": self.batch}
        own: dict[str, Any] = {"max_tokens": self.max_tokens, "thinking": self.thinking, **self.capacity}
        own |= {"stop": list(self.stop), "ignore_eos": self.ignore_eos, "system_prompt": self.system_prompt}
        return {"model": "jddtree", **(self.origin or {}), **names, **own, **self.request}


def examples(tasks: Sequence[Task], limit: int | None) -> dict[str, list[Example]]:
    """The examples of every task by its name. Raises UserError for two tasks of a name, and without an example."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}, but must be at least 1")
    found: dict[str, list[Example]] = {}
    for task in tasks:
        if task.name in found:
            raise UserError(f"--tasks names {task.name!r} twice; leave one out")
        found[task.name] = list(task.examples(limit))
        if not found[task.name]:
            raise UserError(f"task {task.name!r} has no example; check its file")
    return found


def job(model: Model, task: Task, example: Example, index: int, settings: Settings) -> Job:
    """The request for an example. Raises UserError for a prompt that cannot be rendered."""
    ids = prompt_ids(
        model, example.prompt, raw=task.raw, thinking=settings.thinking, system_prompt=settings.system_prompt
    )
    most = settings.max_tokens if example.max_tokens is None else example.max_tokens
    stop_ids = () if settings.ignore_eos else model.stop_ids
    request = Request(prompt=ids, max_tokens=most, sequence=index, stop_ids=stop_ids, **settings.request)
    return Job(index, request, (*example.stop, *settings.stop))


def job_or_error(model: Model, task: Task, example: Example, index: int, settings: Settings) -> Job | str:
    """As `job`, but what was wrong with the prompt instead of an exception."""
    try:
        return job(model, task, example, index, settings)
    except UserError as error:
        return str(error)


def fitting_program(model: Model, jobs: Sequence[Job | str], settings: Settings) -> Program:
    """What to compile for jobs: the smallest shapes that hold them, once the settings are known to work.

    A prompt too long for the model fits no program; it becomes an error of its row.
    Raises UserError for settings that would fail in every request.
    """
    if settings.request.get("method", "tree") != "ar" and model.drafter is None:
        raise UserError(
            "this method needs a drafter, but none is loaded; give --draft DIR, --draft ngram or --method ar"
        )
    probe = Request(prompt=[0], max_tokens=settings.max_tokens, stop_ids=model.stop_ids, **settings.request)
    requests = [job.request for job in jobs if isinstance(job, Job)] or [probe]
    longest = max(requests, key=lambda request: len(request.prompt) + request.max_tokens)
    request = replace(probe, prompt=longest.prompt, max_tokens=longest.max_tokens)
    shapes = default_capacity(model, request, sequences=settings.batch, **settings.capacity)
    program = program_for(model, shapes, settings.kernels)
    check_program(program)
    check_request(program, probe)
    return program


def fitting_requests(model: Model, tasks: Sequence[Task], settings: Settings) -> list[Request]:
    """The requests of all examples that the model can take. Raises UserError as `fitting_program`, and for none."""
    asked = examples(tasks, settings.limit)
    jobs = [
        job_or_error(model, task, example, index, settings)
        for task in tasks
        for index, example in enumerate(asked[task.name])
    ]
    program = fitting_program(model, jobs, settings)
    requests = [one.request for one in jobs if isinstance(one, Job) and _fits(program, one.request)]
    if not requests:
        raise UserError("no prompt of the tasks fits the model; see the notes in the samples file")
    return requests


def _fits(program: Program, request: Request) -> bool:
    try:
        check_request(program, request)
    except UserError:
        return False
    return True


def compiled(model: Model, program: Program, settings: Settings) -> Engine:
    """The engine of a program from `fitting_program`."""
    engine = compile_engine(model, program.capacity, program.kernels)
    if settings.tune is not None:
        settings.tune(engine)
    return engine
