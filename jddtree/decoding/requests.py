"""Requests to decode, whether they fit, and the controls that the compiled program takes for them.

Everything in a request is data: nothing compiles when it changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jddtree.decoding.budget import Economy
from jddtree.decoding.calibration import UNCALIBRATED, Calibration
from jddtree.decoding.costs import UNKNOWN, CostTable
from jddtree.decoding.coupling import default_tau
from jddtree.decoding.program import Program
from jddtree.decoding.sampling import Sampling
from jddtree.decoding.state import STOP_IDS, Controls
from jddtree.decoding.tree import Shape
from jddtree.errors import UserError

METHODS = ("ar", "chain", "tree")
ALIASES = {"dflash": "chain", "ddtree": "tree"}  # the names of the papers, which are those of drafters here


def method_of(name: str) -> str:
    """The method that a name or an alias stands for; an unknown name comes back as it is."""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    prompt: token ids. method: "ar" (no draft), "chain" (the top-1 candidates) or "tree"; an alias is replaced
    by what it stands for. budget: nodes per round beside the root, for "tree". auto: use as many of them as
    pay, by the engine's cost table. top_k_cap: candidates per slot, None for all compiled ones. spine: put
    the top-1 chain first. temperature 0 is greedy; top_p 1 keeps everything. sequence: tells samples with one
    seed apart. coupling: draft with the target's noise, where it samples; tau: how much its scores are
    flattened, None for the best known (`jddtree.decoding.coupling`). stop_ids: at most 16.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    method: str = "tree"
    budget: int = 32
    top_k_cap: int | None = None
    spine: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sequence: int = 0
    stop_ids: Sequence[int] = ()
    auto: bool = False
    coupling: bool = True
    tau: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", method_of(self.method))


def controls_of(
    program: Program,
    requests: Sequence[Request | None],
    calibration: Calibration = UNCALIBRATED,
    costs: CostTable = UNKNOWN,
) -> Controls:
    """The controls of one request per sequence, as host arrays; see `Engine`."""
    empty = Request(prompt=(), method="ar")
    filled = [empty if request is None else request for request in requests]
    integers = lambda values: np.array(list(values), np.int32)
    stops = np.full((len(filled), STOP_IDS), -1, np.int32)
    for row, request in zip(stops, filled, strict=True):
        row[: len(request.stop_ids)] = request.stop_ids
    most = np.iinfo(np.int32).max
    weights = [calibration.of(request.temperature, request.coupling) for request in filled]
    budgets = {"ar": lambda request: 0, "chain": lambda request: most, "tree": lambda request: request.budget}
    caps = [1 if request.method == "chain" else request.top_k_cap or most for request in filled]
    return Controls(
        sampling=Sampling(
            np.array([request.temperature for request in filled], np.float32),
            np.array([request.top_p for request in filled], np.float32),
            np.array([request.seed for request in filled], np.uint32),
            np.array([request.sequence for request in filled], np.uint32),
        ),
        coupling=np.array([_coupling(request) for request in filled], np.float32),
        trees=Shape(
            integers(budgets[request.method](request) for request in filled),
            integers(caps),
            np.array([request.spine for request in filled]),
            np.zeros(len(filled), bool),
        ),
        economy=Economy(
            np.array([request.auto and request.method == "tree" for request in filled]),
            np.array(weights, np.float32),
            costs.arrays(program.capacity.sequences * program.capacity.rows),
        ),
        max_tokens=integers(request.max_tokens for request in filled),
        stop_ids=stops,
    )


def _coupling(request: Request) -> float:
    """What `couple` takes: tau * T, or 0 for off"""
    if not request.coupling or request.temperature == 0:
        return 0.0
    return request.temperature * (default_tau(request.temperature) if request.tau is None else request.tau)


def check_request(program: Program, request: Request) -> None:
    """Raise UserError when a request does not fit the compiled program."""
    capacity, prompt, vocabulary = program.capacity, request.prompt, program.target.vocab_size
    if request.method not in METHODS:
        raise UserError(f"method is {request.method!r}, but must be one of {', '.join(METHODS)}")
    if not len(prompt):
        raise UserError("the prompt is empty (0 tokens), but at least 1 is needed; give a text or token ids")
    if len(prompt) >= capacity.context:
        raise UserError(
            f"the prompt is {len(prompt)} tokens long, but the context holds {capacity.context} with at "
            "least one new token; shorten the prompt or raise --max-context"
        )
    if bad := [token for token in prompt if not 0 <= token < vocabulary]:
        raise UserError(
            f"the prompt holds token id {bad[0]}, but this target's ids are 0 to {vocabulary - 1}"
        )
    check_numbers(request)
    if request.method != "ar" and program.drafter is None:
        raise UserError(
            f"method {request.method!r} needs a drafter, but none was given; "
            "give --draft DIR, --draft ngram or --method ar"
        )
    if request.method == "tree" and not 0 <= request.budget < capacity.rows:
        raise UserError(
            f"the budget is {request.budget} nodes, but the capacity of {capacity.rows} rows allows 0 to "
            f"{capacity.rows - 1}; lower --budget or raise --capacity"
        )
    if request.top_k_cap is not None and not 1 <= request.top_k_cap <= capacity.candidates:
        raise UserError(
            f"--top-k-cap is {request.top_k_cap}, but must be 1 to the {capacity.candidates} compiled "
            "candidates"
        )
    if len(request.stop_ids) > STOP_IDS:
        raise UserError(f"{len(request.stop_ids)} stop token ids were given, but at most {STOP_IDS} fit")


def check_numbers(request: Request) -> None:
    """Raise UserError for a number of a request that no program could take."""
    if not 1 <= request.max_tokens < 2**31:
        raise UserError(f"--max-tokens is {request.max_tokens}, but must be 1 to {2**31 - 1}")
    if not request.temperature >= 0 or not request.temperature < float("inf"):
        raise UserError(f"--temperature is {request.temperature}, but must be a number of at least 0")
    if not 0 < request.top_p <= 1:
        raise UserError(f"--top-p is {request.top_p}, but must be above 0 and at most 1")
    if request.tau is not None and not 0 < request.tau < float("inf"):
        raise UserError(f"--tau is {request.tau}, but must be a number above 0")
    if not 0 <= request.seed < 2**32 or not 0 <= request.sequence < 2**32:
        raise UserError(
            f"--seed is {request.seed} (sequence {request.sequence}), but must be 0 to {2**32 - 1}"
        )


def merged_controls(fresh: np.ndarray, old: Controls, new: Controls) -> Controls:
    """New controls for the sequences in bool `fresh` [B]; the others keep theirs. Costs are of all and new"""
    pick = lambda old, new: np.where(fresh.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    costs = new.economy.costs
    own = lambda controls: controls._replace(economy=controls.economy._replace(costs=()))
    merged = jax.tree.map(pick, own(old), own(new))
    return merged._replace(economy=merged.economy._replace(costs=costs))
