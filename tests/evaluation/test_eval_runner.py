"""Tasks through a static batch: slots refill, rows survive a kill, a resumed run gives the files of one
run.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import pytest
from conftest import ROOT
from eval_harness import CONTEXT, Functions, engine, micro, scorer, settings
from harness import compilations

from jddtree import results as benchmark_results
from jddtree.cli import eval as cli
from jddtree.cli.options import (
    EvalOptions,
    EvalRequestOptions,
    ModelOptions,
    QuietOptions,
    RunOptions,
    ShapeOptions,
)
from jddtree.decoding.engine import Engine, Request
from jddtree.errors import UserError
from jddtree.evaluation import losslessness, runner
from jddtree.evaluation import samples as samples_module
from jddtree.evaluation.prompting import fitting_program, fitting_requests, job
from jddtree.evaluation.samples import Samples, read_rows, run_time, samples_file
from jddtree.evaluation.summary import score
from jddtree.evaluation.tasks.definition import Example, Score
from jddtree.evaluation.tasks.mathematics import GSM8K
from jddtree.evaluation.tasks.userfile import UserFile
from jddtree.prompts import prompt_ids
from jddtree.serving.generation import generate_batch
from jddtree.serving.scheduler import Answer, Job, answers
from jddtree.serving.transcript import Statistics

TIMES = ("date", "total_evaluation_time_seconds", "command", "economy", "seconds", "decode_seconds")


def jobs(**request) -> list[Job]:
    """The jobs of the shared task, with some fields of their requests set."""
    task = Functions()
    made = [
        job(micro(), task, example, index, settings()) for index, example in enumerate(task.examples(None))
    ]
    return [replace(one, request=replace(one.request, **request)) for one in made]


def run(folder, task=None, **changes):
    """A run of the shared task with the shared engine."""
    return runner.run(micro(), [task or Functions()], settings(**changes), folder, engine())


def files(folder):
    """Contents of the only results file and the only samples file, without times."""
    (results,), (samples,) = folder.glob("results_*.json"), folder.glob("samples_*.jsonl")
    found = json.loads(results.read_text())
    header = json.loads(samples.read_text().split("\n")[0])
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in read_rows(samples)]
    return {key: value for key, value in found.items() if key not in TIMES}, header, rows


@pytest.fixture(scope="module", autouse=True)
def commit():
    """The results name the commit, which must not change while the tests compare files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_results, "commit", lambda: "0123456789ab")
        yield


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("once")
    run(folder)
    return files(folder)


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def kill_after(monkeypatch, writes: int, share: float) -> None:
    """Make the next `writes` lines whole, then write a share of one and die."""
    whole = Samples._write
    left = [writes]

    def write(self, row):
        if left[0] == 0:
            line = (json.dumps(row) + "\n").encode()
            self._file.write(line[: int(len(line) * share)])
            self._file.flush()
            raise Killed
        left[0] -= 1
        whole(self, row)

    monkeypatch.setattr(Samples, "_write", write)


def test_slots_refill_without_compiling_and_give_what_one_by_one_gives():
    """Eight jobs of three lengths through three slots, against each one alone."""
    made = jobs()
    engine()
    with compilations() as events:
        found = sorted(answers(micro(), engine(), made), key=lambda answer: answer.index)
    assert not events and [answer.index for answer in found] == list(range(8))
    for answer, one in zip(found, made, strict=True):
        alone = generate_batch(micro(), engine(), [one.request] * 3, one.stop)[0]
        assert (answer.text, answer.token_ids) == (alone.text, alone.token_ids)
        assert answer.finish_reason == alone.finish_reason
        assert answer.statistics.emitted_per_round == alone.statistics.emitted_per_round


def test_samples_do_not_depend_on_the_slot():
    """In the reverse order the same noise meets the same example; other places have other noise."""
    made = jobs(temperature=1.0, seed=5, max_tokens=12)
    one, other = (
        {a.index: a.token_ids for a in answers(micro(), engine(), order)} for order in (made, made[::-1])
    )
    assert one == other
    same = [Job(index, replace(made[0].request, sequence=index)) for index in range(4)]
    assert len({tuple(a.token_ids) for a in answers(micro(), engine(), same)}) > 1


def test_a_stop_string_frees_its_slot():
    """It ends the text before max_tokens, and the next job starts in its place."""
    request = replace(jobs()[0].request, max_tokens=40)
    plain = next(answers(micro(), engine(), [Job(0, request)]))
    stop = plain.text[12:15]
    cut = list(answers(micro(), engine(), [Job(index, request, (stop,)) for index in range(5)]))
    assert {answer.text for answer in cut} == {plain.text[: plain.text.index(stop)]} and len(cut) == 5
    assert {answer.finish_reason for answer in cut} == {"stop"}
    assert {len(answer.token_ids) for answer in cut} < {len(plain.token_ids)} | set(range(40))


def test_files_have_lm_evals_keys(once):
    found, header, rows = once
    assert found["results"]["functions"]["alias"] == "functions" and found["versions"] == {"functions": 1}
    values = [row["returns"] for row in rows if row["metrics"]]
    assert len(values) == 7 and found["results"]["functions"]["returns,none"] == sum(values) / 7
    assert found["n-samples"] == {"functions": {"original": 8, "effective": 8}}
    assert found["speculation"]["functions"]["tokens"] == sum(row["tokens"] for row in rows)
    assert header["header"]["seed"] == 3 and [row["doc_id"] for row in rows] == list(range(8))
    assert {"doc", "target", "arguments", "resps", "filtered_resps", "doc_hash"} <= set(rows[0])
    assert rows[0]["tokens"] == 24 == 1 + sum(rows[0]["emitted_per_round"])


def test_standard_error_is_that_of_a_mean():
    rows = [{"metrics": ["exact"], "exact": value} for value in (0.0, 1.0, 1.0, 1.0)] + [{"metrics": []}]
    assert score(rows) == {"exact,none": 0.75, "exact_stderr,none": 0.25}


@pytest.mark.parametrize("seed", range(4))
def test_resume_after_kills_gives_the_files_of_one_run(seed, tmp_path, monkeypatch, once):
    """Killed up to three times, each in the middle of a line; no row that was written is asked for again."""
    random_ = random.Random(seed)
    tasks = []
    for _ in range(random_.randint(1, 3)):
        kill_after(monkeypatch, random_.randint(0, 4), random_.random())
        tasks.append(Functions())
        with pytest.raises(Killed):
            run(tmp_path, tasks[-1])
        monkeypatch.undo()
    (path,) = tmp_path.glob("samples_*.jsonl")
    kept = max(path.read_bytes().count(b"\n") - 1, 0)
    tasks.append(Functions())
    run(tmp_path, tasks[-1])
    assert files(tmp_path) == once
    assert len(tasks[-1].scored) == 8 - kept


class Moments:
    """Places of a run at which it can die: before each dispatch, score and replaced file, and inside each
    write.

    left: it dies at the so many-th of them, or of those of one name; 0 never.
    """

    def __init__(self, monkeypatch, left: int, share: float, only: str | None = None):
        self.left, self.share, self.lock = left, share, threading.Lock()
        places = {Engine: "run", Functions: "score", Samples: "_write", samples_module: "replace_file"}
        for owner, name in [*places.items(), (runner, "replace_file")]:
            if only in (None, name):
                monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name), name))

    def wrapped(self, function, name):
        """The function, which dies in the place of its call when it is time."""

        def call(*arguments, **options):
            with self.lock:  # scores are made by threads
                self.left -= 1
                now = self.left == 0
            if now and name == "_write":
                samples, row = arguments
                line = (json.dumps(row) + "\n").encode()
                samples._file.write(line[: int(len(line) * self.share)])
                samples._file.flush()
            if now:
                raise Killed
            return function(*arguments, **options)

        return call


def bytes_of(folder) -> dict[str, bytes]:
    """Every file of a run by its name, both without times."""
    names = rb"seconds|decode_seconds|date|total_evaluation_time_seconds|command|tokens_per_s"
    times = rb'"(' + names + rb')": ("[^"]*"|[0-9.e+-]+)'
    name = lambda path: re.sub(r"_[0-9T.-]+(?=\.json)", "", path.name)
    return {name(path): re.sub(times, rb'"\1": 0', path.read_bytes()) for path in folder.iterdir()}


def test_ten_kills_at_random_moments_give_the_bytes_of_one_run(tmp_path):
    """Two by SIGKILL from outside, six at seeded random moments inside the process, two while the ends are
    written.
    """
    many, options = lambda: Functions(count=30), {"request": {"method": "ar"}, "context": 64}
    once, killed, random_ = tmp_path / "once", tmp_path / "killed", random.Random(6)
    run(once, many(), **options)
    for number in range(10):
        if number in (2, 5):
            kill_a_process(killed, 30, random_.uniform(0.0, 0.4))
            continue
        last = number - 7  # of the two files that a run replaces at its end
        left, only = (last, "replace_file") if last > 0 else (random_.randint(1, 8), None)
        with pytest.MonkeyPatch.context() as patch:
            Moments(patch, left, random_.random(), only)
            with pytest.raises(Killed):
                run(killed, many(), **options)
        assert not list(killed.glob("results_*"))
    run(killed, many(), **options)
    assert bytes_of(killed) == bytes_of(once) and len(bytes_of(once)) == 2


def test_resume_after_a_kill_before_the_results(tmp_path, monkeypatch, once):
    """Nothing is left to answer then."""
    monkeypatch.setattr(runner, "results", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        run(tmp_path)
    monkeypatch.undo()
    task = Functions()
    run(tmp_path, task)
    assert files(tmp_path) == once and task.scored == []


def test_a_finished_run_is_left_alone(tmp_path):
    run(tmp_path, limit=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run(tmp_path, limit=2)
    assert len(list(tmp_path.iterdir())) == 4 and all(
        path.read_bytes() == data for path, data in before.items()
    )


def test_resume_with_other_settings_is_refused(tmp_path, monkeypatch):
    """One line that names the setting and both values; so does another list of examples."""
    kill_after(monkeypatch, 3, 0.5)
    with pytest.raises(Killed):
        run(tmp_path)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"unfinished run with temperature 0.0, but this one has 0.5; "):
        run(tmp_path, request={"temperature": 0.5})
    with pytest.raises(UserError, match=r"unfinished run with limit None, but this one has 2; "):
        run(tmp_path, limit=2)
    with pytest.raises(UserError, match="unfinished run with examples "):
        run(tmp_path, Functions(count=9))


def test_files_that_cannot_be_gone_on_with(tmp_path):
    """A line that is no row, a second run at a time, and a folder that is a file."""
    path = samples_file(tmp_path, "a task/b", run_time(tmp_path))
    assert path.name.startswith("samples_a-task-b_")
    path.write_text('{"header": {}}\n{"no": 1}\n')
    with pytest.raises(UserError, match="line 2 is no doc_id line"):
        Samples(path, {})
    path.write_text('{"header": {}}\n')
    with_lock = Samples(path, {})
    with pytest.raises(UserError, match="being written by another run"):
        Samples(path, {})
    with_lock.close()
    with pytest.raises(UserError, match="cannot be written"):
        Samples(path / "x.jsonl", {})


def test_rows_with_odd_text_come_back(tmp_path):
    """Line separators of Unicode and lone surrogates included."""
    path = tmp_path / "samples_x_0.jsonl"
    row = {"doc_id": 0, "text": "a\u2028b\x85c\nd\ud800"}
    samples = Samples(path, {})
    samples.append(row)
    samples.finish()
    samples.close()
    again = Samples(path, {})
    again.close()
    assert read_rows(path) == [row] and again.rows == {0: row}


class Odd(Functions):
    """Two of three prompts cannot be asked."""

    def examples(self, limit):
        """As the protocol says."""
        odd = [Example("long", "word " * 400), Example("roles", [{"role": 3, "content": "x"}])]
        return [*odd, Example("fine", "def main(")]


def test_a_prompt_that_cannot_be_asked_is_an_error_of_its_row(tmp_path):
    found, _ = run(tmp_path, Odd())
    (path,) = tmp_path.glob("samples_*.jsonl")
    rows = read_rows(path)
    assert [row["finish_reason"] for row in rows] == ["error", "error", "length"]
    assert "context holds 256" in rows[0]["note"] and "role" in rows[1]["note"]
    assert found["speculation"]["functions"]["errors"] == 2


def test_settings_that_cannot_work_leave_no_file(tmp_path):
    for wrong, text in (
        ({"request": {"temperature": -1.0}}, "--temperature is -1.0"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"limit": 0}, "--limit is 0"),
    ):
        with pytest.raises(UserError, match=text):
            run(tmp_path, **wrong)
    with pytest.raises(UserError, match="needs a drafter"):
        runner.run(replace(micro(), drafter=None), [Functions()], settings(), tmp_path)
    with pytest.raises(UserError, match="twice"):
        runner.run(micro(), [Functions(), Functions()], settings(), tmp_path)
    with pytest.raises(UserError, match="no example"):
        run(tmp_path, Functions(count=0))
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import conftest
from pathlib import Path
from eval_harness import Functions, micro, settings
from jddtree.evaluation import runner
slow = lambda *_: time.sleep(0.2)
options = settings(request={{"method": "ar"}}, context=64)
runner.run(micro(), [Functions(count=int(sys.argv[2]))], options, Path(sys.argv[1]), progress=slow)
"""


def lines_of(folder) -> int:
    """Whole lines in the samples files, headers included."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("samples_*.jsonl"))


def kill_a_process(folder, count: int, later: float) -> None:
    """Run the shared task in a process of its own and end it with SIGKILL some seconds after its third
    line.
    """
    script = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"))
    aim, deadline = lines_of(folder) + 3, time.monotonic() + 120
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder), str(count)], env=os.environ | {"XLA_FLAGS": ""}
    )
    while lines_of(folder) < aim and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(later)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_prompts_are_raw_or_go_through_the_template():
    example = Example("x", "def f(")
    for raw in (True, False):
        found = job(micro(), Functions(raw=raw), example, 4, settings()).request
        assert found == Request(
            prompt=prompt_ids(micro(), "def f(", raw=raw),
            max_tokens=16,
            budget=8,
            seed=3,
            sequence=4,
            stop_ids=micro().stop_ids,
        )
    assert CONTEXT == engine().program.capacity.context


OPTIONS = {
    "tasks": None,
    "limit": None,
    "max_tokens": 12,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 0,
    "batch": 3,
    "allow_code": False,
    "compare": None,
    "golden": None,
    "perplexity": None,
    "thinking": None,
    "target": None,
    "draft": None,
    "check": False,
    "method": "ddtree",
    "budget": 8,
    "top_k_cap": None,
    "spine": False,
    "plot": None,
    "coupling": True,
    "tau": None,
    "cost": None,
    "calibration": None,
    "dtype": "float32",
    "max_context": CONTEXT,
    "mesh": None,
    "expert_layout": "tensor",
    "kernels": "auto",
    "compile_cache": True,
    "json_output": True,
    "quiet": False,
    "system_prompt": None,
    "stop": None,
    "ignore_eos": False,
    "capacity": None,
    "prefill_chunk": None,
    "rounds_per_dispatch": None,
    "coordinator": None,
    "processes": None,
    "process_id": None,
}
GROUPS = (EvalOptions, ModelOptions, EvalRequestOptions, ShapeOptions, RunOptions, QuietOptions)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run `eval` on the shared engine; returns its code, the tables, the JSON object and stderr."""
    monkeypatch.setattr("jddtree.cli.opening.load", lambda *_, **__: micro())
    monkeypatch.setattr("jddtree.cli.terminal.eval_tables.Scorer", lambda *_, **__: scorer())
    monkeypatch.setattr(cli, "use_compile_cache", lambda _: None)
    for module in (runner, losslessness):
        monkeypatch.setattr(module, "compiled", lambda *_: engine())

    def call(**options):
        given = OPTIONS | {"output": tmp_path / "out"} | options
        code = cli.run(*[group(**{one.name: given[one.name] for one in fields(group)}) for group in GROUPS])
        captured = capsys.readouterr()
        *tables, last = captured.out.splitlines()
        return code, tables, json.loads(last), captured.err

    return call


def test_command_runs_a_users_file(command, tmp_path):
    """The table, one JSON object as the last line, the files, and a bar with speed and score."""
    given = tmp_path / "mine.jsonl"
    given.write_text('{"prompt": "def main(", "answer": "x"}\n{"prompt": "class A"}\n')
    code, tables, found, bars = command(tasks=str(given))
    assert code == 0 and tables[0].startswith("| task | metric | value | stderr | n |")
    (name,) = found["results"]
    assert found["n-samples"][name]["effective"] == 2 and found["config"]["dtype"] == "float32"
    assert "tokens/s" in bars and "exact_match" in bars
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_command_compares(command, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_tasks", lambda *_: [Functions()])
    code, tables, found, _ = command(tasks="x", compare="ar,ddtree", limit=3)
    assert (
        code == 0 and found["compare"]["identical"] == 3 and "identical: 3 of 3 prompts in float32" in tables
    )
    (path,) = (tmp_path / "out").iterdir()
    assert json.loads(path.read_text())["config"]["limit"] == 3


def test_command_draws_what_the_trees_brought(command, monkeypatch, tmp_path):
    """The report is about the task's prompts: its real run has the tokens of the samples; JSON and
    pictures.
    """
    monkeypatch.setattr(cli, "_tasks", lambda *_: [Functions(count=3)])
    code, tables, found, bars = command(tasks="x", plot=tmp_path / "pictures")
    assert code == 0 and "Acceptance by depth" in tables and "speculation report" in bars
    (whole,) = [row for row in found["rounds"] if row["table"] == "summary"]
    assert whole["prompts"] == 3
    (real,) = [row for row in found["rounds"] if row["table"] == "real"]
    assert real["budget"] == 8 and real["same_text"] and real["rounds"] == whole["rounds"]
    (samples,) = (tmp_path / "out").glob("samples_*")
    # The report knows no stop string.
    written = [row["tokens"] - 1 for row in read_rows(samples) if row["doc_id"] != 1]
    assert whole["tokens"] >= sum(written) + 1
    saved = json.loads((tmp_path / "pictures" / "speculation.json").read_text())
    assert saved["rows"] == found["rounds"] and len(list((tmp_path / "pictures").glob("*.png"))) == 6


def test_a_prompt_that_does_not_fit_is_left_out_of_the_report():
    (request,) = fitting_requests(micro(), [Odd()], settings())
    assert list(request.prompt) == prompt_ids(micro(), "def main(", raw=True)

    class Long(Odd):
        def examples(self, limit):
            """As the protocol says."""
            return super().examples(limit)[:2]

    with pytest.raises(UserError, match="no prompt of the tasks fits"):
        fitting_requests(micro(), [Long()], settings())


def test_options_of_generate_reach_the_requests(tmp_path):
    """Stop strings beside the example's own, no stop tokens, a system prompt, and compiled shapes."""
    more = settings(
        stop=("self",),
        ignore_eos=True,
        system_prompt="Be brief.",
        shapes={"rows": 16, "chunk": 8, "rounds": 2},
    )
    one = job(micro(), Functions(raw=False), Functions().examples(2)[1], 1, more)
    assert one.stop == ("\n\n", "self") and one.request.stop_ids == ()
    text = one.request.prompt
    assert list(text) == prompt_ids(micro(), "    def is_empty(self", system_prompt="Be brief.")
    shapes = fitting_program(micro(), [one], more).capacity
    assert (shapes.rows, shapes.chunk, shapes.rounds, shapes.context) == (16, 8, 2, CONTEXT)
    record = more.record([Functions()])
    assert record["stop"] == ["self"] and record["rows"] == 16 and record["system_prompt"] == "Be brief."


def test_decoding_goes_on_while_an_answer_is_scored(tmp_path, monkeypatch):
    """The first score waits for the last answer to be decoded, which would never come if decoding waited for
    it.
    """
    decoded = threading.Event()
    honest = runner.answers

    def told(*arguments):
        yield from honest(*arguments)
        decoded.set()

    class Slow(Functions):
        def score(self, example, answer):
            """As the protocol says."""
            return Score({"in_time": float(decoded.wait(60))})

    monkeypatch.setattr(runner, "answers", told)
    found, _ = run(tmp_path, Slow())
    assert found["results"]["functions"]["in_time,none"] == 1.0


def test_thinking_that_did_not_end_scores_nothing(tmp_path):
    """Though what the answer should hold is in it; the row says why."""
    task, options = one_question("def main(", "x"), {"thinking": True, "request": {"temperature": 4.0}}
    asked = job(micro(), task, task.examples(1)[0], 0, settings(**options))
    (thought,) = answers(micro(), engine(), [asked])
    assert asked.thinking and len(thought.text) > 4 and "</think>" not in thought.text
    run(tmp_path, one_question("def main(", thought.text[:4]), **options)
    ((row,),) = (read_rows(path) for path in tmp_path.glob("samples_*"))
    assert (row["contains"], row["exact_match"], row["thinking_ended"]) == (0.0, 0.0, False)
    assert row["note"] == f"thinking did not end ({thought.finish_reason})"


def one_question(prompt: str, answer: str) -> UserFile:
    """A user's file of one row."""
    return UserFile("mine", (Example("one", prompt, answer),))


@pytest.mark.parametrize(
    "text, opened, score, ended",
    [
        ("She has 16 - 3 - 4 = 9 eggs left. 9 * 2 = 18. Wait, maybe", True, 0.0, False),
        ("<think>9 * 2 = 18", False, 0.0, False),
        ("18", False, 1.0, True),
        ("is it 19?</think>18", True, 1.0, True),
        ("is it 18?</think>19", True, 0.0, True),
        ("18</think>", True, 0.0, True),
    ],
)
def test_gsm8k_scores_what_follows_the_thinking(text, opened, score, ended):
    task = GSM8K()
    (example,) = task.examples(1)
    asked = replace(job(micro(), task, example, 0, settings(thinking=opened)), thinking=opened)
    row = runner._row(task, example, asked, Answer(0, text, [], "length", Statistics(0)))
    assert row["exact_match"] == score and row["thinking_ended"] == ended
    assert ended or row["note"] == "thinking did not end (length)"


@pytest.mark.parametrize("thinking, raw", [(True, False), (False, False), (True, True)])
def test_only_a_template_opens_thinking(thinking, raw):
    example = Example("x", "<think>", None)
    assert job(micro(), Functions(raw=raw), example, 0, settings(thinking=thinking)).thinking == (
        thinking and not raw
    )


def test_a_scorer_that_fails_ends_the_run_and_keeps_the_rows(tmp_path):
    """It is a defect, not a score; the other rows are found again."""

    class Failing(Functions):
        def score(self, example, answer):
            """As the protocol says."""
            if example.id == "f5":
                raise ZeroDivisionError
            return super().score(example, answer)

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Failing())
    task = Functions()
    run(tmp_path, task)
    assert "f5" in task.scored and len(files(tmp_path)[2]) == 8


def test_command_measures_perplexity_and_checks_golden(command, tmp_path):
    """A golden check that fails ends with 1; its token is improbable."""
    text, golden = tmp_path / "text.py", tmp_path / "golden.json"
    text.write_text("def main():\n    return 0\n")
    place = {"tail": [7], "top1_lp": [-0.1], "top8_ids": [[7, 8]], "top8_lp": [[-0.1, -3.0]]}
    golden.write_text(json.dumps({"seqs": [{"name": "x", "prompt_ids": [1024, 258]} | place]}))
    code, tables, found, _ = command(perplexity=text, golden=golden)
    assert code == 1 and not found["golden"]["passed"] and found["perplexity"]["tokens"] > 5
    assert any("golden: FAILED on 1 texts, 1 tokens" in line for line in tables)


def test_command_refuses_what_it_cannot_do(command):
    for options, text in (
        ({}, "nothing to do"),
        ({"compare": "ar,ddtree"}, "--compare needs prompts"),
        ({"plot": ROOT / "none"}, "--plot needs prompts"),
        ({"tasks": "x", "plot": ROOT / "none", "method": "ar"}, "the method is 'ar'"),
        ({"tasks": "x", "compare": "ar"}, "two or more"),
        ({"tasks": "humanevil"}, "humanevil"),
        ({"perplexity": ROOT / "none.txt"}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=text):
            command(**options)
