"""The measured drain rate, the time to come back that follows from it, and the books of places."""

import pytest

from server.admission import AdmissionControl
from server.errors import ApiError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def control(queued: int = 10, tokens: int = 0) -> tuple[AdmissionControl, Clock]:
    clock = Clock()
    return AdmissionControl(queued, tokens, clock=clock), clock


def retry_after(admission: AdmissionControl, num_requests: int = 1, num_tokens: int = 1) -> int:
    with pytest.raises(ApiError) as caught:
        admission.ticket(running_limit=2).admit(num_requests, num_tokens)
    assert caught.value.headers is not None
    return int(caught.value.headers["retry-after"])


def full(admission: AdmissionControl) -> None:
    ticket = admission.ticket(running_limit=2)
    ticket.admit(12, 0)
    ticket.start(12, 0)


def drain(admission: AdmissionControl, clock: Clock, count: int, seconds_each: float) -> None:
    for _ in range(count):
        ticket = admission.ticket(running_limit=10**6)
        ticket.admit(1, 0)
        ticket.start(1, 0)
        clock.now += seconds_each
        ticket.close()


def test_the_time_to_come_back_follows_the_measured_rate() -> None:
    for seconds_each, expected in ((0.01, 1), (2.0, 10), (100.0, 60)):
        admission, clock = control()
        full(admission)
        drain(admission, clock, 20, seconds_each)
        assert retry_after(admission, num_requests=5) == expected


def test_a_crowd_is_told_to_come_back_one_after_the_other() -> None:
    admission, clock = control()
    full(admission)
    drain(admission, clock, 20, 0.5)  # two a second
    assert [retry_after(admission) for _ in range(6)] == [1, 1, 2, 2, 3, 3]
    clock.now += 2
    assert retry_after(admission) in (2, 3), "of seven, about four are let in by then"
    assert [retry_after(admission) for _ in range(200)][-1] == 60
    drain(admission, clock, 240, 0.5)
    assert retry_after(admission) == 1, "the crowd is gone"


def test_a_faster_present_counts_more_than_a_slow_past() -> None:
    admission, clock = control()
    full(admission)
    drain(admission, clock, 20, 10.0)
    assert retry_after(admission, 5) == 50
    drain(admission, clock, 600, 0.2)
    assert retry_after(admission, 5) in (1, 2)


def test_idle_time_says_nothing_about_the_rate() -> None:
    admission, clock = control()
    drain(admission, clock, 20, 2.0)
    clock.now += 3600
    full(admission)
    assert retry_after(admission, 5) == 10


def test_without_a_measurement_there_is_still_a_time() -> None:
    admission, _ = control()
    full(admission)
    assert 1 <= retry_after(admission) <= 60


def test_token_refusals_follow_the_rate_of_prompt_tokens() -> None:
    admission, clock = control(queued=0, tokens=1000)
    first = admission.ticket(2)
    first.admit(1, 800)
    first.start(1, 800)
    clock.now += 4
    first.prompt_computed(400)
    assert retry_after(admission, 1, 700) == 1
    assert retry_after(admission, 1, 900) == 3
    admission.ticket(2).admit(1, 600)


def test_what_was_refused_or_never_started_is_no_measurement() -> None:
    admission, clock = control(queued=0, tokens=1000)
    holder = admission.ticket(2)
    holder.admit(1, 900)
    holder.start(1, 900)
    guess = retry_after(admission, 1, 200)
    late = admission.ticket(2)
    late.admit(1, 0)
    clock.now += 1
    with pytest.raises(ApiError):
        late.start(1, 200)  # the text turned out to be longer than what was sure before it was encoded
    late.close()
    assert retry_after(admission, 1, 200) == guess
    assert (admission.num_requests, admission.num_tokens) == (1, 900)


def test_a_ticket_gives_back_what_it_holds_and_no_more() -> None:
    admission, _ = control()
    ticket = admission.ticket(2)
    ticket.admit(4, 10)
    ticket.start(3, 30)
    assert (admission.num_requests, admission.num_tokens) == (3, 30)
    ticket.sequence_ended()
    ticket.prompt_computed(20)
    assert (admission.num_requests, admission.num_tokens) == (2, 10)
    for _ in range(2):
        ticket.close()
        ticket.sequence_ended()
        assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_bodies_share_a_limit_until_they_are_done_with() -> None:
    admission, _ = control()
    with admission.body() as first:
        first.arrived(200 << 20)
        with pytest.raises(ApiError) as caught, admission.body() as second:
            second.arrived(100 << 20)
        assert caught.value.status == 429
        with admission.body() as third:
            third.arrived(50 << 20)
    with admission.body() as fourth:
        fourth.arrived(256 << 20)


def test_texts_in_work_are_limited_and_give_their_place_back() -> None:
    admission, _ = control(queued=2)
    with admission.text_work():
        with admission.text_work(), pytest.raises(ApiError) as caught, admission.text_work():
            pass
        assert (caught.value.status, caught.value.headers) == (429, {"retry-after": "1"})
        with admission.text_work():
            pass
    unlimited, _ = control(queued=0)
    with unlimited.text_work(), unlimited.text_work():
        pass
