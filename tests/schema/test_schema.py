"""schemathesis in its short form; ``make schema-test`` runs all of its phases."""

import re
from pathlib import Path

import pytest

from tests.schema.check import SHORT_PHASES, send


@pytest.mark.slow
def test_answers_to_generated_requests_are_as_described(tmp_path: Path) -> None:
    code, report = send(tmp_path, examples=3, seed=1, phases=SHORT_PHASES)
    assert code == 0, report
    # A run that could not send anything has found nothing either.
    tested = re.search(r"Tested: (\d+)", report)
    generated = re.search(r"(\d+) generated, (\d+) passed", report)
    assert tested is not None
    assert generated is not None
    assert int(tested[1]) == 17
    assert int(generated[1]) == int(generated[2]) > 30
