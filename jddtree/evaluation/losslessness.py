"""Does speculation change nothing: the same prompts by several methods, token by token.

Contract: each method runs on the smallest engine for it, one after the other. Where two answers part, the report says
how sure the target was there: the margin, its largest logit minus the second in a teacher-forced pass over what the
answers share. In float32 answers are identical but for ties; in bfloat16 they part where the margin is within rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jddtree.decoding.engine import Engine
from jddtree.decoding.requests import METHODS, method_of
from jddtree.errors import UserError
from jddtree.evaluation.asking import Settings, compiled, examples, fitting_program, job
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.slots import Answer, Job, answers
from jddtree.evaluation.task import Task
from jddtree.loading import Model

Progress = Callable[[str, int, int, int], None]
"""Called with a method, the prompts done and in all, and the tokens written."""


def methods_of(text: str) -> list[str]:
    """The methods of a comma list, aliases replaced. Raises UserError for an unknown one and for fewer than two."""
    methods = [method_of(name) for name in text.split(",")]
    if len(set(methods)) < max(len(methods), 2) or not set(methods) <= set(METHODS):
        raise UserError(f"--compare is {text!r}, but must be two or more of {','.join(METHODS)} with commas")
    return methods


def compare(
    model: Model,
    tasks: Sequence[Task],
    settings: Settings,
    methods: Sequence[str],
    engines: Callable[[str], Engine] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the tasks' prompts by every method and compare with the first one's answers.

    engines: gives the engine of a method; None compiles them. Returns the report: methods, prompts, identical (prompts
    at which all agree), identical_share, speculation per method, and a row per prompt: task, id, identical, and
    divergences [{method, position (in the answer, from 0), margin (logits), tokens (of the first method and of this
    one, null after an end)}].
    Raises UserError for prompts that the model cannot take.
    """
    asked = [(task.name, example) for task in tasks for example in examples([task], settings.limit)[task.name]]
    jobs = _jobs(model, tasks, settings)
    found = {
        method: _answers(model, jobs, _with(settings, method), engines(method) if engines else None, method, progress)
        for method in methods
    }
    differing = _Margins(model, jobs, settings)
    rows: list[dict[str, Any]] = []
    for index, (task, example) in enumerate(asked):
        texts = {method: found[method][index].token_ids for method in methods}
        parted = [differing.row(index, texts[methods[0]], texts[method], method) for method in methods[1:]]
        divergences = [row for row in parted if row is not None]
        rows.append({"task": task, "id": example.id, "identical": not divergences, "divergences": divergences})
    same = sum(row["identical"] for row in rows)
    return {
        "methods": list(methods),
        "dtype": str(model.dtype),
        "prompts": len(rows),
        "identical": same,
        "identical_share": same / len(rows),
        "speculation": {method: _speed(found[method]) for method in methods},
        "rows": rows,
    }


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two texts differ, None where they are the same; an early end differs at its end."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _with(settings: Settings, method: str) -> Settings:
    return replace(settings, request={**settings.request, "method": method})


def _jobs(model: Model, tasks: Sequence[Task], settings: Settings) -> list[Job]:
    """One job per prompt; indices run over all tasks, sequences over each"""
    made = [
        job(model, task, example, place, settings)
        for task in tasks
        for place, example in enumerate(task.examples(settings.limit))
    ]
    return [replace(one, index=index) for index, one in enumerate(made)]


def _answers(
    model: Model, jobs: Sequence[Job], settings: Settings, engine: Engine | None, method: str, progress: Progress | None
) -> list[Answer]:
    jobs = [replace(job, request=replace(job.request, method=method)) for job in jobs]
    program = fitting_program(model, jobs, settings)
    found: list[Answer] = []
    for answer in answers(model, engine or compiled(model, program, settings), jobs):
        if answer.error:
            raise UserError(f"prompt {answer.index}: {answer.error}")
        found.append(answer)
        if progress is not None:
            progress(method, len(found), len(jobs), sum(len(one.token_ids) for one in found))
    return sorted(found, key=lambda answer: answer.index)


class _Margins:
    """Rows for answers that part; the scorer is compiled when the first one does"""

    def __init__(self, model: Model, jobs: Sequence[Job], settings: Settings):
        self.model, self.jobs, self.settings = model, jobs, settings
        self.scorer: Scorer | None = None

    def row(self, index: int, one: list[int], other: list[int], method: str) -> dict[str, Any] | None:
        if (place := first_divergence(one, other)) is None:
            return None
        tokens = [text[place] if place < len(text) else None for text in (one, other)]
        shared = [*self.jobs[index].request.prompt, *one[:place]]
        return {"method": method, "position": place, "margin": self._margin(shared), "tokens": tokens}

    def _margin(self, shared: list[int]) -> float:
        """Largest minus second logit after some tokens"""
        if self.scorer is None:
            longest = max(len(job.request.prompt) + job.request.max_tokens for job in self.jobs) + 1
            context = min(longest, self.model.target.max_position_embeddings)
            self.scorer = Scorer(self.model, max(context, 2), kernels=self.settings.kernels)
        return float(self.scorer.score([*shared, 0]).margins[-1])


def _speed(found: Sequence[Answer]) -> dict[str, float | int]:
    rounds = [count for answer in found for count in answer.statistics.emitted_per_round]
    return {
        "tokens": sum(len(answer.token_ids) for answer in found),
        "rounds": len(rounds),
        "acceptance_length": sum(rounds) / max(len(rounds), 1),
    }
