"""The scheduler: first come, first served; a cancelled request frees its slot at once and changes no
neighbour.
"""

from dataclasses import replace

import numpy as np
import pytest
from eval_harness import CONTEXT, engine, micro
from harness import compilations
from hypothesis import given, settings
from hypothesis.strategies import data, lists, sampled_from

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


ALONE: dict[tuple, list[int]] = {}


def remembered(request: Request) -> list[int]:
    """`alone`, once for each prompt and length."""
    key = (*request.prompt, request.max_tokens)
    if key not in ALONE:
        ALONE[key] = alone(request)
    return ALONE[key]


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


def lengthened(one: Request, ids: list[int], text: str) -> Request:
    """The second turn of a chat: what was asked and answered, and more."""
    return replace(one, prompt=[*one.prompt, *ids, *prompt_ids(micro(), text, raw=True)])


@pytest.mark.parametrize("options", [{}, {"method": "ar"}, {"temperature": 0.8, "seed": 5}], ids=str)
def test_a_second_turn_prefills_its_own_part_only_and_writes_what_a_fresh_slot_does(options) -> None:
    first, other, *_ = requests(**options)
    scheduler = Scheduler(micro(), engine(), reuse=True)
    begun = [scheduler.submit(one) for one in (first, other)]
    pieces = drain(scheduler, {})
    answer = joined(first.prompt, pieces[begun[0]]).token_ids
    turn = lengthened(first, answer, "\n    def second(self")
    wanted = alone(turn)
    with compilations() as events:
        ticket = scheduler.submit(turn)
        result = joined(turn.prompt, drain(scheduler, {})[ticket])
    assert not events and result.token_ids == wanted
    assert result.statistics.cached_tokens == len(first.prompt) + len(answer) - 1


def test_a_prompt_that_was_asked_before_prefills_its_last_token() -> None:
    asked = requests()[0]
    scheduler = Scheduler(micro(), engine(), reuse=True)
    results = []
    for _ in range(2):
        ticket = scheduler.submit(asked)
        results.append(joined(asked.prompt, drain(scheduler, {})[ticket]))
    assert results[0].token_ids == results[1].token_ids == alone(asked)
    assert [one.statistics.cached_tokens for one in results] == [0, len(asked.prompt) - 1]


def test_what_a_stop_string_or_a_cancel_left_in_the_caches_is_taken_over_rightly() -> None:
    """The device had written past the end of the text, or was in the middle of it."""
    asked = requests(max_tokens=40)
    whole = [alone(one) for one in asked[:2]]
    stop = micro().tokenizer.decode(whole[0][4:6])
    scheduler = Scheduler(micro(), engine(), reuse=True)
    scheduler.submit(asked[0], [stop])
    cancelled = scheduler.submit(asked[1])
    scheduler.step()
    scheduler.step()
    scheduler.cancel(cancelled)
    drain(scheduler, {})
    for one, ids in zip(asked, whole, strict=False):
        turn = replace(one, prompt=[*one.prompt, *ids[:12]], max_tokens=12)
        ticket = scheduler.submit(turn)
        result = joined(turn.prompt, drain(scheduler, {})[ticket])
        assert result.token_ids == alone(turn)
        assert result.statistics.cached_tokens >= len(one.prompt)


def test_without_reuse_nothing_is_taken_over() -> None:
    asked = requests()[0]
    scheduler = Scheduler(micro(), engine())
    for _ in range(2):
        ticket = scheduler.submit(asked)
        result = joined(asked.prompt, drain(scheduler, {})[ticket])
        assert result.statistics.cached_tokens == 0


def test_those_that_write_go_on_while_a_long_prompt_is_read() -> None:
    """One chunk at most between two dispatches, and the long one writes what it does alone."""
    chunk = engine().program.capacity.chunk
    short, long = requests(max_tokens=60)[:2]
    long = replace(long, prompt=(list(long.prompt) * chunk)[: 4 * chunk - 3])
    scheduler = Scheduler(micro(), engine())
    first = scheduler.submit(short)
    scheduler.step()
    second = scheduler.submit(long)
    steps = []
    pieces: dict[int, list] = {}
    while second not in pieces:
        events = scheduler.step()
        steps.append([ticket for ticket, _ in events])
        for ticket, piece in events:
            pieces.setdefault(ticket, []).append(piece)
    assert steps == [[first], []] * 3 + [[first], [second]]
    pieces = drain(scheduler, pieces)
    assert joined(long.prompt, pieces[second]).token_ids == alone(long)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data())
def test_whatever_comes_and_goes_each_text_is_the_one_alone(drawn) -> None:
    """Requests of shared beginnings, submitted and cancelled at any step."""
    pool = [replace(one, max_tokens=12) for one in requests()]
    pool += [replace(one, prompt=[*one.prompt, *remembered(one)[:5]]) for one in pool[:3]]
    scheduler = Scheduler(micro(), engine(), reuse=True)
    asked: dict[int, Request] = {}
    pieces: dict[int, list] = {}
    for action in drawn.draw(lists(sampled_from(["submit", "submit", "step", "cancel"]), max_size=16)):
        if action == "submit":
            one = drawn.draw(sampled_from(pool))
            asked[scheduler.submit(one)] = one
        elif action == "cancel" and asked:
            ticket = drawn.draw(sampled_from(sorted(asked)))
            scheduler.cancel(ticket)
            del asked[ticket]
        else:
            for ticket, piece in scheduler.step():
                pieces.setdefault(ticket, []).append(piece)
    drain(scheduler, pieces)
    for ticket, one in asked.items():
        assert joined(one.prompt, pieces[ticket]).token_ids == remembered(one)
