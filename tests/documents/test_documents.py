"""The documents in their short form, on a fake model without preferences; ``make documents-test`` has 1,000
of the real one."""

import asyncio

import pytest

from tests.documents.documents import fault_of, run
from tests.documents.schemas import CASES
from tests.http.live_server import live_server


def test_documents_of_every_schema_validate_or_were_cut() -> None:
    with live_server() as server:
        summary = asyncio.run(run(server.url, 3 * len(CASES), concurrency=16, max_tokens=400))
        cut = asyncio.run(run(server.url, len(CASES), concurrency=16, max_tokens=12))
    report = "\n".join([*summary.lines(), *cut.lines()])
    print(report)
    assert not summary.faults() + cut.faults(), report
    assert len(summary.documents) == 3 * len(CASES)
    complete = {document.schema for document in summary.documents if document.outcome == "complete"}
    assert len(complete) > 0.8 * len(CASES), report
    assert cut.counts()["length"] > 0, report
    assert all(document.num_tokens == 12 for document in cut.documents if document.outcome == "length")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nested", '{"name":"a"', "does not parse"),
        ("nested", '{"name":"a","address":{"street":"b","city":"c","zip":"1234"}}', "does not match"),
        (
            "formats",
            '{"day":"2024-02-30","at":"10:00:00Z","created":"2024-02-01T10:00:00Z"}',
            "is not a 'date'",
        ),
        (
            "formats",
            '{"day":"2024-02-03","at":"24:00:00Z","created":"2024-02-01T10:00:00Z"}',
            "is not a 'time'",
        ),
        ("formats", '{"day":"2024-02-03","at":"10:00:00Z","created":"2024-02-01"}', "is not a 'date-time'"),
        (
            "addresses of machines",
            '{"id":"00000000-0000-4000-8000-000000000000","ip":"::1","host":"-a"}',
            "is not a 'hostname'",
        ),
    ],
)
def test_what_does_not_follow_its_schema_is_a_fault(name: str, text: str, said: str) -> None:
    assert said in (fault_of(text, CASES[name].schema) or "")
