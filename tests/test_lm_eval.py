"""The adapter for lm-evaluation-harness: through its evaluator with local YAML tasks, and each kind of request."""

import json
from types import SimpleNamespace

import pytest
from eval_harness import CONTEXT, engine, micro

from jddtree.errors import UserError

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
    return made


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
    (good, greedy), (bad, other) = lm.loglikelihood([request("    def add(", text), request("    def add(", " zebra")])
    assert good > bad and greedy and not other
    (whole,) = lm.loglikelihood_rolling([request("    def add(" + text)])
    (empty, _), (prompt, _) = lm.loglikelihood([request("", "    def add(" + text), request("", "    def add(")])
    assert whole == pytest.approx(empty, abs=1e-3) and prompt + good == pytest.approx(whole, abs=1e-3)
    assert lm.loglikelihood_rolling([request("")]) == [0.0]
    spaced = lm.loglikelihood([request("    return ", "self"), request("    return", " self")])
    assert spaced[0][0] == pytest.approx(spaced[1][0])


@needs_lm_eval
def test_long_contexts_lose_their_beginning(lm):
    (text,) = lm.generate_until([request("x = 1\n" * 400, {"until": ["\n"], "max_gen_toks": 8})])
    assert isinstance(text, str)
    ((value, _),) = lm.loglikelihood([request("x = 1\n" * 400, "x")])
    assert value < 0


@needs_lm_eval
def test_chat_template(lm):
    """The ids of a rendered conversation are the template's, whatever a message holds."""
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    text = lm.apply_chat_template(messages)
    assert "hi" in text and lm._encode(text) == micro().chat.encode(micro().tokenizer, messages, thinking=False)
    assert lm._encode(text + "So") == micro().tokenizer.encode(text + "So", allow_special=True)
    assert lm.tokenizer_name
    lm._rendered.clear()
