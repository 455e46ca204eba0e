"""The models of this project for lm-evaluation-harness (0.4.13), which comes with the `eval` extra.

Importing this module imports lm_eval; nothing else in the package does. Use: `lm_eval.simple_evaluate(model=
JDDTreeLM(load(...)), tasks=[...], task_manager=TaskManager(include_path=DIR, include_defaults=False))`. Its stock tasks
name data sets on a hub; offline, a YAML with `dataset_path: json` reads local files (docs/evaluation.md).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jddtree.api import prompt_ids
from jddtree.decoding.engine import Engine, Request
from jddtree.decoding.generate import compile_engine, default_capacity
from jddtree.errors import UserError
from jddtree.evaluation.likelihood import Scorer
from jddtree.evaluation.perplexity import log_likelihood
from jddtree.evaluation.slots import Job, answers
from jddtree.loading import Model

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UserError(f"lm-eval cannot be imported ({error}); install the extra: pip install 'jddtree[eval]'") from None


class JDDTreeLM(LM):
    """A model as lm-eval sees it: text in, text and natural log-probabilities out.

    Texts are raw prompts, with the model's raw prefix; those that `apply_chat_template` made become its ids, in which
    no message can forge a control token. A context too long for the engine loses its beginning, as in lm-eval.
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
        kernels: str | None = None,
    ):
        """Nothing is compiled before it is needed. max_tokens: of an answer whose task sets none."""
        super().__init__()
        self.model, self.batch, self.max_tokens, self.kernels = model, batch, max_tokens, kernels
        self.context = min(context, model.target.max_position_embeddings)
        self.options: dict[str, Any] = {"method": method, "budget": budget, "seed": seed}
        self.thinking = model.defaults.thinking if thinking is None else thinking
        self.prefix = model.defaults.raw_prefix or model.stop_ids[:1]
        self._rendered: dict[str, list[int]] = {}

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
        """Answers to (context, options); of the options it reads until, max_gen_toks, do_sample, temperature, top_p."""
        jobs = [self._job(index, *request.args) for index, request in enumerate(requests)]
        found = {answer.index: answer for answer in answers(self.model, self.engine, jobs)}
        for answer in found.values():
            if answer.error:
                raise UserError(f"request {answer.index} of lm-eval: {answer.error}")
        return [found[index].text for index in range(len(jobs))]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For (context, continuation): log-probability of the continuation, and whether greedy decoding writes it."""
        return [self._pair(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For (text,): log-probability of all its tokens after the prefix, windows overlapping by half."""
        found = []
        for (text,) in (request.args for request in requests):
            tokens = [*self.prefix, *self.model.tokenizer.encode(text)]
            scored = len(tokens) > len(self.prefix)
            found.append(log_likelihood(self.scorer, tokens, len(self.prefix)) if scored else 0.0)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation; its ids are remembered for the request that will hold it."""
        options: dict[str, Any] = {"thinking": self.thinking, "add_generation_prompt": add_generation_prompt}
        text = self.model.chat.render(chat_history, **options)
        self._rendered[text] = self.model.chat.encode(self.model.tokenizer, chat_history, **options)
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
        until = options.get("until") or []
        most = min(int(options.get("max_gen_toks", self.max_tokens)), self.context - 1)
        temperature = float(options.get("temperature") or 0.0)
        request = Request(
            prompt=self._encode(context)[-(self.context - most) :],
            max_tokens=most,
            temperature=temperature if options.get("do_sample", temperature > 0) else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            sequence=index,
            stop_ids=self.model.stop_ids,
            **self.options,
        )
        return Job(index, request, tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop))

    def _pair(self, context: str, continuation: str) -> tuple[float, bool]:
        """Both are encoded together, and the spaces that end the context belong to the continuation, as in lm-eval"""
        if context in self._rendered or not context:
            before = self._encode(context) if context else list(self.prefix)
            tokens = [*before, *self.model.tokenizer.encode(continuation)]
        else:
            bare = context.rstrip()
            before, tokens = self._encode(bare), self._encode(context + continuation)
        count = len(tokens) - len(before)
        if count < 1:
            return 0.0, True
        tokens = tokens[-self.context :]
        scores = self.scorer.score(tokens)
        count = min(count, len(tokens) - 1)
        greedy = scores.best[-count:].tolist() == tokens[-count:]
        return float(scores.log_probs[-count:].sum(dtype=float)), greedy
