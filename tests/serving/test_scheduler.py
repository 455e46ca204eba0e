"""The scheduler: first come, first served; a cancelled request frees its slot at once and changes no
neighbour.
"""

from dataclasses import replace

import numpy as np
import pytest
from eval_harness import CONTEXT, engine, micro
from harness import compilations

from jddtree.decoding.requests import Request
from jddtree.decoding.state import IDLE
from jddtree.errors import UserError
from jddtree.prompts import prompt_ids
from jddtree.serving.generation import generate_batch
from jddtree.serving.scheduler import Scheduler
from jddtree.serving.transcript import joined

NAMES = ["add", "is_empty", "close", "main", "reset"]


def requests(**changes) -> list[Request]:
    """Five requests, two more than there are slots."""
    prompts = [prompt_ids(micro(), f"    def {name}(self", raw=True) for name in NAMES]
    return [Request(prompt, **{"max_tokens": 24, "budget": 8} | changes) for prompt in prompts]


def alone(request: Request, stop: tuple[str, ...] = ()) -> list[int]:
    """The ids of a request with nobody beside it."""
    return generate_batch(micro(), engine(), [request] * 3, stop)[0].token_ids


def drain(scheduler: Scheduler, pieces: dict[int, list]) -> dict[int, list]:
    """Step until nothing is left; the pieces of every ticket."""
    while scheduler.busy:
        for ticket, piece in scheduler.step():
            pieces.setdefault(ticket, []).append(piece)
    return pieces


def test_five_requests_through_three_slots_are_each_as_alone():
    asked = [
        replace(one, max_tokens=count) for one, count in zip(requests(), (24, 5, 24, 9, 12), strict=True)
    ]
    wanted = [alone(one) for one in asked]
    with compilations() as events:
        scheduler = Scheduler(micro(), engine())
        tickets = [scheduler.submit(one) for one in asked]
        pieces = drain(scheduler, {})
    assert not events and list(pieces)[:3] == tickets[:3]
    for ticket, one, ids in zip(tickets, asked, wanted, strict=True):
        assert joined(one.prompt, pieces[ticket]).token_ids == ids


def test_cancel_frees_the_slot_and_leaves_neighbours_alone():
    """One that runs and one that waits are dropped; what waited behind them runs, and nothing of them is
    written.
    """
    asked = requests(max_tokens=40)
    wanted = [alone(one) for one in asked]
    scheduler = Scheduler(micro(), engine())
    tickets = [scheduler.submit(one) for one in asked]
    begun = {ticket: [piece] for ticket, piece in scheduler.step()}
    assert list(begun) == tickets[:3]
    scheduler.cancel(tickets[1])
    scheduler.cancel(tickets[3])
    pieces = drain(scheduler, begun)
    assert set(pieces) == {tickets[0], tickets[1], tickets[2], tickets[4]} and len(pieces[tickets[1]]) == 1
    for place in (0, 2, 4):
        assert joined(asked[place].prompt, pieces[tickets[place]]).token_ids == wanted[place]


def test_a_slot_without_a_request_does_no_round():
    """After a cancel and after a stop string the device's sequence is idle, so rounds are not spent on it."""
    scheduler = Scheduler(micro(), engine())
    first, second = (scheduler.submit(one) for one in requests(max_tokens=100)[:2])
    scheduler.step()
    scheduler.cancel(second)
    scheduler.step()
    state = scheduler._state
    assert state is not None and np.asarray(state.finish)[1] == IDLE
    scheduler.cancel(first)
    assert not scheduler.busy and scheduler.step() == []


def test_a_request_that_does_not_fit_is_refused_when_it_is_submitted():
    scheduler = Scheduler(micro(), engine())
    with pytest.raises(UserError, match=f"the context holds {CONTEXT}"):
        scheduler.submit(Request([1024] * CONTEXT))
    assert not scheduler.busy


def test_cancelling_what_has_ended_does_nothing():
    scheduler = Scheduler(micro(), engine())
    ticket = scheduler.submit(requests(max_tokens=3)[0])
    pieces = drain(scheduler, {})
    scheduler.cancel(ticket)
    assert pieces[ticket][-1].finish_reason == "length" and not scheduler.busy


def test_auto_without_costs_is_refused_when_it_is_submitted():
    """Not when it is admitted, where it would end the requests beside it."""
    scheduler = Scheduler(micro(), engine())
    with pytest.raises(UserError, match="what rounds cost is not known"):
        scheduler.submit(replace(requests()[0], auto=True))
    assert not scheduler.busy
