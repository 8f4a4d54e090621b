"""The files of a batch: lines are checked before anything runs, and an output goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.batch.files import BatchFileError, BatchInput, BatchOutput, parse_line
from server.settings.settings import SettingsError


def line(custom_id: str = "a", **changes: Any) -> bytes:
    value = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}, **changes}
    return json.dumps(value).encode() + b"\n"


def batch_of(folder: Path, *lines: bytes) -> BatchInput:
    file = folder / "in.jsonl"
    file.write_bytes(b"".join(lines))
    return BatchInput(file)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected an object"),
        (line(custom_id=""), "custom_id"),
        (line(method="GET"), "method"),
        (line(url="http://other/v1/completions"), "url"),
        (line(url="/v1/"), "url"),
        (line(body=[]), "body"),
        (line(body={"stream": True}), "body.stream"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(text: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_line(text)


def test_all_faults_of_an_input_are_listed_by_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        batch_of(tmp_path, line("a"), b"\n", line("a"), b"{\n")
    assert "line 3: custom_id 'a' is that of line 1 too" in str(refused.value)
    assert "line 4: not valid JSON" in str(refused.value)


def test_an_output_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, line("a"), line("b"))
    file = tmp_path / "out.jsonl"
    with BatchOutput(file, batch) as output:
        output.write("a", {"status_code": 200}, None)
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"id": "cut')
    with BatchOutput(file, batch) as output:
        assert output.done == {"a"}
        output.write("b", None, {"code": "x"})
    lines = file.read_bytes().splitlines()
    assert [json.loads(text)["custom_id"] for text in lines] == ["a", "b"]
    assert file.read_bytes().startswith(whole)


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(line("other"))
    with pytest.raises(SettingsError, match="line 1 is no answer to a request of this input"):
        BatchOutput(file, batch_of(tmp_path, line("a")))
    assert file.read_bytes() == line("other")


def test_an_input_that_changed_is_noticed(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, line("a"))
    (tmp_path / "in.jsonl").write_bytes(b"{\n")
    with pytest.raises(BatchFileError, match="line 1 has changed"):
        list(batch.requests())
