"""Ask a model every example of some tasks, score the answers, and keep both on the disk as they come.

Contract: an interrupted run goes on where it was, and its files are those of one run but for times. Answers are scored
beside decoding, which never waits for a score; rows are written in the order in which they are scored.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from jddtree.decoding.engine import Engine
from jddtree.decoding.generate import Statistics
from jddtree.decoding.program import Program
from jddtree.evaluation.asking import Settings, compiled, examples, fitting_program, job_or_error
from jddtree.evaluation.samples import Row, Samples, missing, replace_file, results_file, run_time, samples_file
from jddtree.evaluation.slots import Answer, Job, answers
from jddtree.evaluation.summary import results
from jddtree.evaluation.task import Example, Score, Task
from jddtree.loading import Model
from jddtree.parallel.processes import from_first

TODO = "evaluation/todo"
SCORERS = min(4, os.cpu_count() or 1)
Progress = Callable[[str, int, int, list[Row]], None]
"""Called with a task's name, the examples done and in all, and the rows so far."""


def run(
    model: Model,
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> tuple[Row, Path]:
    """Run tasks, or go on with the unfinished run in a folder; returns the results and their file.

    engine: None compiles the smallest that fits. Raises UserError for settings that cannot work, or that differ from
    those of the unfinished run.
    """
    begun = time.time()
    asked = examples(tasks, settings.limit)
    jobs, program = _jobs(model, tasks, asked, settings)
    when, config = run_time(folder), settings.record(tasks)
    opened = _open(tasks, asked, config, folder, when)
    try:
        todo = {name: list(missing(samples, len(jobs[name]))) for name, samples in opened.items()}
        from_first(TODO, json.dumps(todo))
        engine = engine or compiled(model, program, settings)
        for task in tasks:
            _ask(model, engine, task, asked[task.name], jobs[task.name], opened[task.name], progress)
        rows = {name: samples.finish() for name, samples in opened.items()}
    finally:
        for samples in opened.values():
            samples.close()
    counts = {task.name: len(task.examples(None)) for task in tasks}
    found = results(tasks, rows, config, counts, begun)
    replace_file(results_file(folder, when), (json.dumps(found, indent=1) + "\n").encode())
    return found, results_file(folder, when)


def follow(model: Model, tasks: Sequence[Task], settings: Settings, engine: Engine | None = None) -> None:
    """The part of the other processes in a `run` of the first one: to decode what it decodes. Nothing is written."""
    jobs, program = _jobs(model, tasks, examples(tasks, settings.limit), settings)
    todo = json.loads(from_first(TODO))
    engine = engine or compiled(model, program, settings)
    for task in tasks:
        asked = [jobs[task.name][index] for index in todo[task.name]]
        for _ in answers(model, engine, [job for job in asked if isinstance(job, Job)]):
            pass


def _jobs(
    model: Model, tasks: Sequence[Task], asked: dict[str, list[Example]], settings: Settings
) -> tuple[dict[str, list[Job | str]], Program]:
    """What to ask for every example of every task, or why it cannot be asked; and the program for it"""
    jobs = {
        task.name: [
            job_or_error(model, task, example, index, settings) for index, example in enumerate(asked[task.name])
        ]
        for task in tasks
    }
    return jobs, fitting_program(model, [job for part in jobs.values() for job in part], settings)


def _open(
    tasks: Sequence[Task], asked: dict[str, list[Example]], config: Row, folder: Path, when: str
) -> dict[str, Samples]:
    """The rows of every task so far; all files are open for the whole run, so that no other run takes one"""
    opened: dict[str, Samples] = {}
    try:
        for task in tasks:
            header = config | {"task": task.name, "version": task.version, "examples": _digest(asked[task.name])}
            opened[task.name] = Samples(samples_file(folder, task.name, when), header)
    except BaseException:
        for samples in opened.values():
            samples.close()
        raise
    return opened


def _ask(
    model: Model,
    engine: Engine,
    task: Task,
    asked: Sequence[Example],
    jobs: Sequence[Job | str],
    samples: Samples,
    progress: Progress | None,
) -> None:
    """Answer, score and write what has no row yet"""
    todo = [(index, jobs[index]) for index in missing(samples, len(jobs))]
    failed = [Answer(index, "", [], "error", Statistics(0), error=job) for index, job in todo if isinstance(job, str)]
    prompts = {job.index: job for _, job in todo if isinstance(job, Job)}
    if progress is not None:
        progress(task.name, len(samples.rows), len(jobs), list(samples.rows.values()))
    row = lambda answer: _row(task, asked[answer.index], prompts.get(answer.index), answer)
    for made in _beside(row, chain(failed, answers(model, engine, list(prompts.values())))):
        samples.append(made)
        if progress is not None:
            progress(task.name, len(samples.rows), len(jobs), list(samples.rows.values()))


def _beside(row: Callable[[Answer], Row], found: Iterable[Answer]) -> Iterator[Row]:
    """The rows of answers, in the order in which they are done; made by threads while the next answers are decoded"""
    pool = ThreadPoolExecutor(SCORERS)
    waiting: set[Future[Row]] = set()
    try:
        for answer in found:
            waiting.add(pool.submit(row, answer))
            done = {future for future in waiting if future.done()}
            waiting -= done
            yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(waiting))
    finally:
        pool.shutdown(cancel_futures=True)


def _row(task: Task, example: Example, job: Job | None, answer: Answer) -> Row:
    """A line of the samples file: lm-eval's keys, then ours"""
    score = Score({}, answer.error) if answer.error else task.score(example, answer.text)
    doc = {key: value for key, value in asdict(example).items() if key != "prompt"}
    options: dict[str, Any] = {"until": list(example.stop)}
    if job is not None:
        options |= {
            "until": list(job.stop),
            "max_gen_toks": job.request.max_tokens,
            "temperature": job.request.temperature,
        }
    return {
        "doc_id": answer.index, "doc": doc, "target": example.reference, "arguments": [[example.prompt, options]],
        "resps": [[answer.text]], "filtered_resps": [answer.text], "filter": "none", "metrics": sorted(score.metrics),
        "doc_hash": _digest(doc), "prompt_hash": _digest(example.prompt), "target_hash": _digest(example.reference),
        **score.metrics,
        "note": score.note, "finish_reason": answer.finish_reason, "prompt_tokens": answer.statistics.prompt_tokens,
        "tokens": len(answer.token_ids), "token_ids": answer.token_ids,
        "emitted_per_round": answer.statistics.emitted_per_round,
        "nodes_per_round": answer.statistics.nodes_per_round,
        "expected_tokens": sum(answer.statistics.expected_tokens),
        "expected_seconds": sum(answer.statistics.expected_seconds),
        "decode_seconds": answer.statistics.decode_s,
        "seconds": answer.seconds,
    }  # fmt: skip


def _digest(value: Any) -> str:
    """Tells whether two values are the same: SHA-256 of their JSON"""
    plain = lambda item: asdict(item) if isinstance(item, Example) else str(item)
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode("utf-8", "replace")).hexdigest()
