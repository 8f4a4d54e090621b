"""``gemserve bench --start``: real starts of a tiny model, and what is said when the server does not come
up."""

import json
from pathlib import Path

import pytest

from server.__main__ import main
from server.bench.start import Start, render_starts
from tests.tiny import write_tiny_folder


def test_a_start_is_measured_until_ready_and_beyond(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    arguments = (
        f"{model} --dtype float32 --num-threads 1 --kv-cache-memory 64MiB --max-num-seqs 4 "
        "--max-num-batched-tokens 64"
    )
    arguments += " --log-format json --log-level error"  # the address is found all the same
    assert main(["bench", "--start", "1", "--json", "--serve-arguments", arguments]) == 0
    output = capsys.readouterr()
    assert "start 1 of 1: ready after" in output.err
    (start,) = json.loads(output.out)
    assert 0 < start["listening_seconds"] < start["ready_seconds"]
    assert {"checkpoint", "tokenizer", "import", "weights", "cache", "warmup"} <= start["phases"].keys()
    assert sum(start["phases"].values()) < start["ready_seconds"]
    assert start["first_request_seconds"] > 0
    assert start["later_request_seconds"] > 0
    assert start["peak_bytes"] > 50 << 20


def test_a_server_that_does_not_come_up_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--start", "1", "--serve-arguments", str(tmp_path / "missing.gguf")]) == 2
    assert "the server does not listen" in (told := capsys.readouterr().err)
    assert "missing.gguf" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--start", "0"], "--start takes a number from 1 on"),
        (["--start", "1", "http://127.0.0.1:1"], "--start takes a number from 1 on"),
        (["--start", "1", "--serve-arguments", "'"], "--serve-arguments: No closing quotation"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_the_table_ends_with_medians() -> None:
    starts = [Start(1.0, ready, {"weights": ready / 2}, 0.3, 0.2, 1 << 30) for ready in (4.0, 9.0, 5.0)]
    lines = render_starts(starts).splitlines()
    assert lines[-2].split() == ["median", "1.00", "5.00", "300", "200", "1024"]
    assert lines[-1].endswith("weights 2.50")
