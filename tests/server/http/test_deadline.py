"""Until when a client waits, by what it says in headers and fields."""

import pytest

from server.errors import ApiError
from server.http.deadline import Deadline, header_timeout, read_timeout_hint


def test_the_earliest_timeout_holds() -> None:
    assert Deadline.of({}, 100.0, 5.0, None, 3.0).at == 103.0
    assert Deadline.of({}, 100.0, None, None).at is None
    assert Deadline().remaining is None
    assert Deadline(at=0.0).remaining == 0.0


def test_patience_counts_from_the_end_of_the_request() -> None:
    patient = Deadline(at=None, patience=5.0, asked_at=100.0)
    assert patient.queue_deadline(stream=False, num_sequences=1, keep_alive_seconds=15.0) == 105.0
    both = Deadline(at=103.0, patience=5.0, asked_at=100.0)
    assert both.queue_deadline(stream=False, num_sequences=1, keep_alive_seconds=15.0) == 103.0
    never = Deadline()
    assert never.queue_deadline(stream=True, num_sequences=1, keep_alive_seconds=15.0) is None


def test_streams_that_get_bytes_keep_patient_clients() -> None:
    def of_stream(patience: float, num_sequences: int) -> float | None:
        deadline = Deadline(patience=patience, asked_at=100.0)
        return deadline.queue_deadline(stream=True, num_sequences=num_sequences, keep_alive_seconds=15.0)

    assert of_stream(5.0, 1) == 105.0
    assert of_stream(15.0, 1) is None
    assert of_stream(5.0, 2) is None


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "inf", "1e9"])
def test_a_header_that_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(ApiError) as refused:
        header_timeout({"x-request-timeout": value})
    assert refused.value.param == "X-Request-Timeout"
    assert read_timeout_hint({"x-stainless-read-timeout": value}) is None


def test_a_header_that_is_one_is_read() -> None:
    assert header_timeout({}) is None
    assert header_timeout({"x-request-timeout": "1.5"}) == 1.5
    assert read_timeout_hint({"x-stainless-read-timeout": "600"}) == 600.0
