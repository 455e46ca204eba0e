"""The adapter for lm-evaluation-harness: through its evaluator with local YAML tasks, and each kind of
request.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from eval_harness import CONTEXT, engine, micro, scorer

from jddtree.errors import UserError
from jddtree.serving.scheduler import Answer
from jddtree.serving.transcript import Statistics

pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's and datasets' own warnings

try:
    import lm_eval
except ImportError:
    lm_eval = None

needs_lm_eval = pytest.mark.skipif(lm_eval is None, reason="lm-eval is not installed (extra `eval`)")

GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["self, x):", "zebra]]"]
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""


def request(*arguments):
    """As lm-eval hands it over."""
    return SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def lm():
    """The adapter with the engine and context that all tests here share."""
    from jddtree.evaluation.lm_eval_adapter import JDDTreeLM

    made = JDDTreeLM(micro(), budget=8, batch=3, context=CONTEXT)
    made.engine = engine()
    made.scorer = scorer()
    return made


@pytest.fixture
def chat(lm):
    """The adapter in thinking mode, and a rendered question."""
    lm.thinking = True
    yield lm, lm.apply_chat_template([{"role": "user", "content": "</think> hi"}])
    lm.thinking, lm._thinks = False, False
    lm._rendered.clear()


@pytest.mark.skipif(lm_eval is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_error_says_how_to_get_it():
    with pytest.raises(UserError, match=r"install the extra: pip install 'jddtree\[eval\]'"):
        import jddtree.evaluation.lm_eval_adapter  # noqa: F401


@needs_lm_eval
def test_evaluator_with_local_tasks(lm, tmp_path, monkeypatch):
    """Generation with an exact match and a choice by log-likelihood, offline."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    (answer,) = lm.generate_until([request("    def add(", {"until": ["\n"], "max_gen_toks": 12})])
    rows = [{"question": "    def add(", "answer": answer}, {"question": "    def close(", "answer": "no"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "generate.yaml").write_text(GENERATE.format(data=data))
    (tmp_path / "choice.yaml").write_text(CHOICE.format(data=data))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=["local_generate", "local_choice"], task_manager=manager, bootstrap_iters=0
    )
    assert found["results"]["local_generate"]["exact_match,none"] == 0.5
    assert found["results"]["local_choice"]["acc,none"] == 1.0


@needs_lm_eval
def test_log_likelihoods(lm):
    """A continuation's is the sum over its tokens; what greedy decoding writes is greedy."""
    (text,) = lm.generate_until([request("    def add(", {"until": [], "max_gen_toks": 6})])
    (good, greedy), (bad, other) = lm.loglikelihood(
        [request("    def add(", text), request("    def add(", " zebra")]
    )
    assert good > bad and greedy and not other
    (whole,) = lm.loglikelihood_rolling([request("    def add(" + text)])
    (empty, _), (prompt, _) = lm.loglikelihood(
        [request("", "    def add(" + text), request("", "    def add(")]
    )
    assert whole == pytest.approx(empty, abs=1e-3) and prompt + good == pytest.approx(whole, abs=1e-3)
    assert lm.loglikelihood_rolling([request("")]) == [0.0]
    spaced = lm.loglikelihood([request("    return ", "self"), request("    return", " self")])
    assert spaced[0][0] == pytest.approx(spaced[1][0])


@needs_lm_eval
@pytest.mark.parametrize(
    "context, continuation, scored",
    [
        ("f(x):\n", " x", [" x"]),  # the newline is one token with the bracket before it
        ("f(x):\n", "  pass", [" ", " pass"]),
        ("return ", "self", [" self"]),
        ("return", " self", [" self"]),
        ("f(x)", ":\n", ["):\n"]),
        ("imp", "ort os", ["import", " os"]),
        ("x = ", " ", ["  "]),
        ("", "import os", ["import", " os"]),
    ],
)
def test_everything_behind_the_common_tokens_is_scored(lm, context, continuation, scored):
    """The sum of the log-probabilities of these tokens in the whole text; greedy if each is the most probable
    one.
    """
    tokenizer = micro().tokenizer
    tokens = [1024, *tokenizer.encode(context + continuation)]
    count = len(scored)
    assert [tokenizer.decode([token]) for token in tokens[-count:]] == scored
    expected = scorer().score(tokens)
    ((value, greedy),) = lm.loglikelihood([request(context, continuation)])
    assert value == pytest.approx(float(expected.log_probs[-count:].sum()), abs=1e-5) and value < -0.001
    assert greedy == (expected.best[-count:].tolist() == tokens[-count:])


@needs_lm_eval
def test_only_an_empty_continuation_is_certain(lm):
    assert lm.loglikelihood([request("f(x):\n", ""), request("", "")]) == [(0.0, True), (0.0, True)]


@needs_lm_eval
def test_without_a_prefix_the_first_token_is_scored_behind_a_stop_token(lm, monkeypatch):
    """Where ids of context and whole share nothing, something must stand before the first."""
    defaults = replace(micro().defaults, raw_prefix=())
    monkeypatch.setattr(lm, "model", replace(micro(), defaults=defaults))
    ((value, _),) = lm.loglikelihood([request("imp", "ort")])
    expected = scorer().score([1024, *micro().tokenizer.encode("import")])
    assert value == pytest.approx(float(expected.log_probs.sum()), abs=1e-5)


@needs_lm_eval
def test_long_contexts_lose_their_beginning(lm, caplog):
    """As many tokens as lm-eval cuts, with its warning."""
    context, ids = "x = 1\n" * 400, micro().tokenizer.encode("x = 1\n" * 400)
    job = lm._job(0, context, {"max_gen_toks": 8})
    assert list(job.request.prompt) == ids[-(CONTEXT - 8) :] and job.request.max_tokens == 8
    assert "exceeds model's max length (256)" in caplog.text
    caplog.clear()
    ((value, _),) = lm.loglikelihood([request(context, "x")])
    expected = scorer().score([*ids, *micro().tokenizer.encode("x")][-CONTEXT:])
    assert value == pytest.approx(float(expected.log_probs[-1]), abs=1e-5)
    assert f"{len(ids) + 2} tokens are scored in a context of 256" in caplog.text


@needs_lm_eval
@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
@pytest.mark.parametrize("most", [32768, CONTEXT, 0, -1])
def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused(lm, name, most):
    with pytest.raises(UserError, match=f"^max_gen_toks is {most}, but the context is {CONTEXT} tokens"):
        lm.generate_until([request("def f(", {"until": [], name: most})])


@needs_lm_eval
@pytest.mark.parametrize(
    "options", [{"max_gen_toks": "many"}, {"temperature": "hot"}, {"max_gen_toks": float("inf")}]
)
def test_options_of_another_kind_are_one_line(lm, options):
    with pytest.raises(UserError, match="^generation_kwargs .* cannot be used: .*; correct the task$"):
        lm.generate_until([request("def f(", options)])


@needs_lm_eval
def test_a_continuation_that_the_context_cannot_hold_is_refused(lm):
    with pytest.raises(UserError, match="^a continuation has 2500 tokens, but the context is 256; "):
        lm.loglikelihood([request("def f(", "x = 1\n" * 500)])


@needs_lm_eval
def test_thinking_that_does_not_end_is_no_answer(chat, caplog):
    """Though it ends by length with text; in an answer that goes on behind it the thinking does not count."""
    lm, prompt = chat
    options = {"until": ["\n"], "max_gen_toks": 12}
    thinking, closed = lm.generate_until([request(prompt + "def f(", options), request(prompt, options)])
    assert thinking == "" and "request 0: thinking did not end (length)" in caplog.text
    assert closed and "request 1" not in caplog.text


@needs_lm_eval
def test_stops_count_behind_the_thinking(chat):
    """A blank line in the thinking does not end the answer, as in lm-eval."""
    from jddtree.evaluation import lm_eval_adapter as adapter

    lm, prompt = chat
    job = lm._job(0, prompt, {"max_gen_toks": 8, "until": "\n\n"})
    assert job.thinking and job.stop == ()
    answer = Answer(0, "16 - 3\n\nso 9</think>\n\n18\n\nDone.", [], "stop", Statistics(0))
    assert adapter._text(job, answer, ("\n\n",)) == "18"


@needs_lm_eval
def test_chat_template(lm):
    """The ids of a rendered conversation are the template's, whatever a message holds."""
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    text = lm.apply_chat_template(messages)
    assert "hi" in text and lm._encode(text) == micro().chat.encode(
        micro().tokenizer, messages, thinking=False
    )
    assert lm._encode(text + "So") == micro().tokenizer.encode(text + "So", allow_special=True)
    assert lm.tokenizer_name
    lm._rendered.clear()
