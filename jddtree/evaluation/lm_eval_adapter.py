"""The models of this project for lm-evaluation-harness (0.4.13), which comes with the `eval` extra.

Importing this module imports lm_eval; nothing else in the package does. Use: `lm_eval.simple_evaluate(model=
JDDTreeLM(load(...)), tasks=[...], task_manager=TaskManager(include_path=DIR, include_defaults=False))`. Its
stock tasks name data sets on a hub; offline, a YAML with `dataset_path: json` reads local files
(docs/evaluation.md).
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any

from jddtree.decoding.engine import Engine, Request
from jddtree.errors import UserError
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.perplexity import log_likelihood
from jddtree.evaluation.tasks.scoring import (
    after_thinking,
    before_stops,
    opens_thinking,
    thinks_to_the_end,
)
from jddtree.loading import Model
from jddtree.prompts import prompt_ids
from jddtree.serving.engines import compile_engine, default_capacity
from jddtree.serving.scheduler import Answer, Job, answers

try:
    from lm_eval.api.model import LM
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
except ImportError as error:
    raise UserError(
        f"lm-eval cannot be imported ({error}); install the extra: pip install 'jddtree[eval]'"
    ) from None

LOG = logging.getLogger(__name__)


class JDDTreeLM(LM):
    """A model as lm-eval sees it: text in, text and natural log-probabilities out.

    Texts are raw prompts, with the model's raw prefix; those that `apply_chat_template` made become its ids,
    in which no message can forge a control token. A context too long for the engine loses its beginning, as
    in lm-eval, with a warning. Where the template began the model's thinking, an answer is what follows it:
    nothing if it did not end.
    """

    def __init__(
        self,
        model: Model,
        *,
        method: str = "tree",
        budget: int = 32,
        batch: int = 8,
        context: int = 2048,
        max_tokens: int = 256,
        seed: int = 0,
        thinking: bool | None = None,
        kernels: str = "auto",
    ):
        """Nothing is compiled before it is needed. max_tokens: of an answer whose task sets none."""
        super().__init__()
        self.model, self.batch, self.max_tokens, self.kernels = model, batch, max_tokens, kernels
        self.context = min(context, model.target.max_position_embeddings)
        self.options: dict[str, Any] = {"method": method, "budget": budget, "seed": seed}
        self.thinking = model.defaults.thinking if thinking is None else thinking
        self.prefix = model.defaults.raw_prefix or model.stop_ids[:1]
        self._rendered: dict[str, list[int]] = {}
        self._thinks = False

    @cached_property
    def engine(self) -> Engine:
        """The engine of `generate_until`."""
        request = Request(prompt=[0], **self.options)
        capacity = default_capacity(self.model, request, sequences=self.batch, context=self.context)
        return compile_engine(self.model, capacity, self.kernels)

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer of the log-likelihoods."""
        return Scorer(self.model, self.context, kernels=self.kernels)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers to (context, options); of the options it reads until, do_sample, temperature, top_p, and
        max_gen_toks by any of lm-eval's names.

        Raises UserError when max_gen_toks leaves no room for a prompt, and for a request that cannot be run.
        """
        stops = [_stops(request.args[1]) for request in requests]
        jobs = [self._job(index, *request.args) for index, request in enumerate(requests)]
        texts = [""] * len(jobs)
        for answer in answers(self.model, self.engine, jobs):
            if answer.error:
                raise UserError(f"request {answer.index} of lm-eval: {answer.error}")
            texts[answer.index] = _text(jobs[answer.index], answer, stops[answer.index])
        return texts

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For (context, continuation): log-probability of the continuation, and whether greedy decoding
        writes it.

        Raises UserError for a continuation longer than the context that the scorer takes.
        """
        return [self._pair(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For (text,): log-probability of all its tokens after the prefix, windows overlapping by half."""
        found = []
        for (text,) in (request.args for request in requests):
            tokens = [*self.prefix, *self.model.tokenizer.encode(text)]
            scored = len(tokens) > len(self.prefix)
            found.append(log_likelihood(self.scorer, tokens, len(self.prefix)) if scored else 0.0)
        return found

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Prompt text of a conversation; its ids are remembered for the request that will hold it."""
        options: dict[str, Any] = {"thinking": self.thinking, "add_generation_prompt": add_generation_prompt}
        text = self.model.chat.render(chat_history, **options)
        self._rendered[text] = self.model.chat.encode(self.model.tokenizer, chat_history, **options)
        self._thinks = self._thinks or opens_thinking(text)
        return text

    @property
    def tokenizer_name(self) -> str:
        """Tells lm-eval's caches of different chat templates apart."""
        return f"jddtree-{self.model.target.vocab_size}-{self.thinking}"

    def _encode(self, text: str) -> list[int]:
        if text in self._rendered:
            return self._rendered[text]
        if self._rendered:  # a rendered conversation with something of lm-eval's after it
            return self.model.tokenizer.encode(text, allow_special=True)
        return prompt_ids(self.model, text, raw=True) or list(self.prefix)

    def _job(self, index: int, context: str, options: dict[str, Any]) -> Job:
        wanted = _normalized(options, self.max_tokens)
        most = self._checked(wanted["max_gen_toks"])
        prompt, _ = maybe_truncate(self._encode(context), most, self.context)
        request = Request(
            prompt=prompt,
            max_tokens=most,
            temperature=wanted["temperature"] if wanted["do_sample"] else 0.0,
            top_p=float(wanted.get("top_p", 1.0)),
            sequence=index,
            stop_ids=self.model.stop_ids,
            **self.options,
        )
        thinking = self._thinks and context.rfind("<think>") > context.rfind("</think>")
        return Job(index, request, () if thinking else _stops(options), thinking)

    def _checked(self, most: int) -> int:
        if not 1 <= most < self.context:
            raise UserError(
                f"max_gen_toks is {most}, but the context is {self.context} tokens, prompt included; set "
                "another max_gen_toks (gen_kwargs of simple_evaluate), or context= of JDDTreeLM up to "
                f"{self.model.target.max_position_embeddings}"
            )
        return most

    def _pair(self, context: str, continuation: str) -> tuple[float, bool]:
        if not continuation:
            return 0.0, True
        tokens, common = self._ids(context, continuation)
        count = len(tokens) - common
        if count >= self.context:
            raise UserError(
                f"a continuation has {count} tokens, but the context is {self.context}; give JDDTreeLM a "
                "larger one"
            )
        if len(tokens) > self.context:
            LOG.warning(
                "%d tokens are scored in a context of %d: the first are cut", len(tokens), self.context
            )
        scores = self.scorer.score(tokens[-self.context :])
        greedy = scores.best[-count:].tolist() == tokens[-count:]
        return float(scores.log_probs[-count:].sum(dtype=float)), greedy

    def _ids(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both together, and how many of them those of the context alone begin with: the rest is
        scored
        """
        before = self._encode(context) if context else list(self.prefix)
        if context in self._rendered or not context:
            return [*before, *self.model.tokenizer.encode(continuation)], len(before)
        tokens = self._encode(context + continuation)
        common = len(commonprefix([before, tokens]))
        return (tokens, common) if common else ([*self.prefix, *tokens], len(self.prefix))


def _normalized(options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return dict(normalize_gen_kwargs(given, max_tokens))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"generation_kwargs {options} cannot be used: {error}; correct the task") from None


def _stops(options: dict[str, Any]) -> tuple[str, ...]:
    until = options.get("until") or []
    return tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)


def _text(job: Job, answer: Answer, stops: tuple[str, ...]) -> str:
    """The answer without thinking that the template began; stops count behind it only, as in lm-eval"""
    if not job.thinking:
        return answer.text
    if thinks_to_the_end(answer.text, opened=True):
        LOG.warning(
            "request %d: thinking did not end (%s); its answer is empty", job.index, answer.finish_reason
        )
        return ""
    return before_stops(after_thinking(answer.text).lstrip(), stops)
