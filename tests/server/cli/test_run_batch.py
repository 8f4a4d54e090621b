"""``gemserve run-batch``: every request gets one answer, whatever happens to the run."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.__main__ import main
from server.batch import files as batch_files
from server.batch import run as batch_run
from tests.fakes import HANG, POISON, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server
from tests.tiny import write_tiny_folder

ROOT = Path(__file__).parent.parent.parent.parent
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(file: Path, lines: list[Any]) -> Path:
    file.write_text(
        "".join(item if isinstance(item, str) else json.dumps(item) + "\n" for item in lines),
        encoding="utf-8",
    )
    return file


def answers(file: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    assert len({answer["custom_id"] for answer in found}) == len(found), "a request has two answers"
    assert len({answer["id"] for answer in found}) == len(found)
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in found)
    return {answer["custom_id"]: answer for answer in found}


def run(source: Path, target: Path, *options: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(target), *options])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as live:
        yield live


MIXED: list[Any] = [
    line("text", prompt="Hello", max_tokens=3, temperature=0),
    line("chat", CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=4),
    line("vector", EMBEDDINGS, input="Hello"),
    line("message", "/v1/messages", messages=[{"role": "user", "content": "Hi"}], max_tokens=2),
    "\n",
    line("wrong", prompt="Hello", temperature=9),
    line("nowhere", "/v1/nowhere", prompt="Hello"),
    line("fault", prompt=[2, POISON]),
    line("ünicode", prompt="日本", max_tokens=1),
    line("half a character", prompt="\ud800"),
    line("half an id \ud800", prompt="x", max_tokens=0),
    line("no number", prompt="x", temperature=float("nan")),
]
STATUS = {"wrong": 400, "nowhere": 404, "fault": 500, "half a character": 400, "no number": 400}


def test_every_request_has_its_answer_whatever_it_is(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", MIXED), tmp_path / "out.jsonl"
    assert run(source, target, "--url", f"{server.url}/v1", "--concurrency", "3") == 1
    found = answers(target)
    assert set(found) == {item["custom_id"] for item in MIXED if isinstance(item, dict)}
    for custom_id, answer in found.items():
        assert answer["error"] is None
        assert answer["response"]["status_code"] == STATUS.get(custom_id, 200)
        assert answer["response"]["request_id"]
    assert (
        found["text"]["response"]["body"]["choices"][0]["text"]
        == server.complete(**MIXED[0]["body"])["choices"][0]["text"]
    )
    assert found["text"]["response"]["request_id"] == found["text"]["response"]["body"]["id"]
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["vector"]["response"]["body"]["data"][0]["embedding"]
    summary = capsys.readouterr().err.splitlines()[-1]
    assert "11 requests: 6 succeeded, 5 failed, 0 were answered before" in summary
    assert "10 generated tokens" in summary


def test_nothing_is_left_to_do_for_a_run_that_was_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("a", prompt="x")]), tmp_path / "out.jsonl"
    write(target, [{"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200}, "error": None}])
    assert run(source, target, "--url", "http://127.0.0.1:9") == 0  # nobody listens there
    assert "1 were answered before" in capsys.readouterr().err
    assert (
        run(write(tmp_path / "empty.jsonl", []), tmp_path / "none.jsonl", "--url", "http://127.0.0.1:9") == 0
    )


def test_a_killed_run_goes_on_without_repeating_lines(tmp_path: Path) -> None:
    num_requests, concurrency = 12, 2
    lines = [line(f"request-{index}", prompt=f"Tale {index}", max_tokens=10) for index in range(num_requests)]
    lines[6]["body"]["prompt"] = [2, HANG]  # holds everything up until it is released
    runner = FakeRunner()
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with live_server(fake_engine_factory(runner)) as slow:
        command = [
            sys.executable,
            "-m",
            "server",
            "run-batch",
            "-i",
            str(source),
            "-o",
            str(target),
            "--url",
            slow.url,
        ]
        command += ["--concurrency", str(concurrency)]
        killed = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < deadline
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        runner.released.set()
        before = target.read_bytes()
        whole = before[: before.rindex(b"\n") + 1]
        assert 3 <= whole.count(b"\n") < num_requests
        with target.open("ab") as file:
            # as if it had died in the middle of a line
            file.write(b'{"id":"batch_req_x","custom_id":"request-')
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{whole.count(bytes([10]))} were answered before" in done.stderr
        assert target.read_bytes().startswith(whole)
        assert set(answers(target)) == {item["custom_id"] for item in lines}
        slow.wait_for(slow.is_idle, 60)
        # Only what was in flight at the kill was sent twice.
        sent = sum(
            slow.metric("requests_total", endpoint="completions", stream="false", outcome=outcome)
            for outcome in ("length", "stop", "client_disconnect")
        )
        assert num_requests <= sent <= num_requests + concurrency


def test_so_many_requests_at_a_time_and_refusals_are_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_retry_after", lambda answer: 0.05)
    lines = [line(str(index), prompt="a", max_tokens=15, n=2, temperature=1) for index in range(6)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    most = 0
    with live_server(
        fake_engine_factory(FakeRunner(step_delay=0.01), max_num_seqs=1), max_queued_requests=3
    ) as small:
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.is_set():
                most = max(most, round(small.metric("http_requests_in_flight", route=COMPLETIONS)))
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            # Three requests of two sequences each are more than one that runs and three that wait.
            assert run(source, target, "--url", small.url, "--concurrency", "3") == 0
        finally:
            over.set()
            watcher.join(60)
        assert small.rejections("queue_full") > 0
    assert 1 <= most <= 3
    assert all(answer["response"]["status_code"] == 200 for answer in answers(target).values())


def test_a_server_that_is_gone_ends_the_run_and_not_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_run, "MAX_ATTEMPTS", 2)
    source, target = (
        write(tmp_path / "in.jsonl", [line("a", prompt="x"), line("b", prompt="x")]),
        tmp_path / "out.jsonl",
    )
    assert run(source, target, "--url", "http://127.0.0.1:9") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "run the same command again to go on" in error
    assert target.read_bytes() == b""


def test_a_disk_that_is_full_ends_the_run_with_one_line(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullFile(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = batch_files.BatchOutput.__init__

    def open_full(output: batch_files.BatchOutput, *arguments: Any) -> None:
        opened(output, *arguments)
        output._file.close()
        output._file = FullFile()  # type: ignore[assignment]

    monkeypatch.setattr(batch_files.BatchOutput, "__init__", open_full)
    lines = [line(str(index), prompt="x", max_tokens=1) for index in range(4)]
    source = write(tmp_path / "in.jsonl", lines)
    assert run(source, tmp_path / "out.jsonl", "--url", server.url, "--concurrency", "2") == 1
    assert "No space left on device; run the same command again" in capsys.readouterr().err.splitlines()[-1]


def test_two_runs_never_write_to_one_file(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = (
        write(tmp_path / "in.jsonl", [line("a", prompt="x", max_tokens=1)]),
        tmp_path / "out.jsonl",
    )
    with batch_files.BatchOutput(target, batch_files.BatchInput(source)) as other:
        other.write("a", {"status_code": 200}, None)
        before = target.read_bytes()
        assert run(source, target, "--url", server.url) == 2
        assert "another run is writing to this file" in capsys.readouterr().err
        assert target.read_bytes() == before
    assert run(source, target, "--url", server.url) == 0
    assert target.read_bytes() == before


def test_an_input_that_changes_while_it_is_read_ends_the_run_with_one_line(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl", [line("a", prompt="x", max_tokens=1), line("b", prompt="x", max_tokens=1)]
    )
    opened = batch_files.BatchOutput.__init__

    def change_first(output: batch_files.BatchOutput, *arguments: Any) -> None:
        opened(output, *arguments)
        write(source, [line("a", prompt="x", max_tokens=1), "{\n"])

    monkeypatch.setattr(batch_files.BatchOutput, "__init__", change_first)
    assert run(source, tmp_path / "out.jsonl", "--url", server.url, "--concurrency", "1") == 1
    assert "line 2 has changed" in capsys.readouterr().err.splitlines()[-1]


def test_a_request_that_takes_too_long_is_an_error_of_its_line(tmp_path: Path) -> None:
    source, target = (
        write(tmp_path / "in.jsonl", [line("a", prompt="x", max_tokens=400)]),
        tmp_path / "out.jsonl",
    )
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.05))) as slow:
        assert run(source, target, "--url", slow.url, "--timeout", "0.3") == 1
    (answer,) = answers(target).values()
    assert answer["response"] is None
    assert answer["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (["{", "\n"], "line 1: not valid JSON"),
        (["[]\n"], "line 1: expected an object"),
        ([line("a", prompt="x"), {"method": "POST", "url": COMPLETIONS, "body": {}}], "line 2: custom_id"),
        ([line("a", prompt="x"), "\n", line("a", prompt="y")], "line 3: custom_id 'a' is that of line 1 too"),
        ([{**line("a", prompt="x"), "method": "GET"}], "line 1: method"),
        ([line("a", "http://elsewhere/v1/completions", prompt="x")], "line 1: url"),
        ([line("a", "/v1/completions\0", prompt="x")], "line 1: url"),
        ([line("a", "/v1/\ud800", prompt="x")], "line 1: url"),
        ([{**line("a"), "body": "x"}], "line 1: body"),
        ([line("a", prompt="x", stream=True)], "line 1: body.stream"),
        ([line("", prompt="x")] * 12, "and 2 more"),
    ],
)
def test_an_input_that_is_wrong_is_refused_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[Any], part: str
) -> None:
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(source, target, "--url", "http://127.0.0.1:9") == 2
    assert part in capsys.readouterr().err
    assert not target.exists()


def test_options_that_contradict_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("a", prompt="x")]), tmp_path / "out.jsonl"
    other = write(tmp_path / "other.jsonl", [{"custom_id": "b"}])
    options: list[Callable[[], int]] = [
        lambda: run(source, other, "--url", "http://127.0.0.1:9"),
        lambda: run(
            source, write(tmp_path / "list.jsonl", [{"custom_id": ["a"]}]), "--url", "http://127.0.0.1:9"
        ),
        lambda: run(source, source, "--url", "http://127.0.0.1:9"),
        lambda: run(tmp_path / "missing.jsonl", target, "--url", "http://127.0.0.1:9"),
        lambda: run(source, tmp_path / "no" / "out.jsonl", "--url", "http://127.0.0.1:9"),
        lambda: run(source, target, "--url", "127.0.0.1:9"),
        lambda: run(source, target, "--url", "http://127.0.0.1:9", "--concurrency", "0"),
        lambda: run(source, target, "some-model", "--url", "http://127.0.0.1:9"),
    ]
    for call in options:
        assert call() == 2
        assert (
            len(
                [
                    text
                    for text in capsys.readouterr().err.splitlines()
                    if text.startswith("gemserve: error: ")
                ]
            )
            == 1
        )
    assert json.loads(other.read_text()) == {"custom_id": "b"}
    assert json.loads(source.read_text()) == line("a", prompt="x")


def test_a_model_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMSERVE_API_KEY", "of-the-server")
    folder = write_tiny_folder(tmp_path / "tiny")
    lines = [line(f"{index}", prompt=f"Tale {index}", max_tokens=5, temperature=0) for index in range(6)]
    lines.append(line("vector", EMBEDDINGS, input=["a", "b"]))
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    small = ["--dtype", "float32", "--num-threads", "1", "--kv-cache-memory", "16MiB", "--max-num-seqs", "2"]
    options = [
        str(folder),
        *small,
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "256",
        "--debug-invariants",
    ]
    assert run(source, target, *options) == 0
    assert set(answers(target)) == {item["custom_id"] for item in lines}
    assert "7 succeeded" in capsys.readouterr().err
    assert (
        run(
            write(tmp_path / "more.jsonl", [*lines, line("new", prompt="x")]),
            target,
            str(tmp_path / "missing"),
        )
        == 1
    )
    assert "missing" in capsys.readouterr().err.splitlines()[-1]
