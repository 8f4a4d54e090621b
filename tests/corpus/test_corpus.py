"""What two answers may differ in and what not, answers as they are read from the wire, and one server that
says the same twice."""

import ast
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.corpus.areas import AREAS
from tests.corpus.areas.completions import complete
from tests.corpus.normal import NormalAnswer, normal_answers
from tests.corpus.recording import Entry, differences, make_recording, read_recording, write_recording
from tests.corpus.servers import SERVERS, chosen_servers
from tests.corpus.wire import CLOSED, Answer, WireError, read_answer

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent.parent
A, B = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def normal(
    body: str, content_type: str = "application/json", *, is_interleaved: bool = False, **headers: str
) -> NormalAnswer:
    given = {
        "content-type": content_type,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    answer = Answer("HTTP/1.1 200 OK", tuple(given.items()), body.encode())
    return normal_answers([answer], is_interleaved=is_interleaved)[0]


def header(answer: NormalAnswer, name: str) -> str:
    return dict(answer.headers)[name]


# -- what answers may differ in ------------------------------------------------------------------------------


def test_ids_get_numbers_by_which_the_same_one_is_known_again() -> None:
    answer = normal(
        f'{{"id":"msg_{A}","item_id":"fc_{B}","again":"msg_{A}"}}', x_request_id=f"msg_{A}", request_id=B
    )
    assert answer.body == '{"id":"msg_<id 1>","item_id":"fc_<id 2>","again":"msg_<id 1>"}'
    assert header(answer, "x-request-id") == "msg_<id 1>"
    assert header(answer, "request-id") == "<id 3>"
    assert normal("{}", x_request_id="of-the-client").headers[1] == ("x-request-id", "of-the-client")


def test_times_and_durations_give_way_and_nothing_else() -> None:
    answer = normal(
        '{"created":1700000000,"queue_ms":0.5,"decode_ms":null,"created_by":5,"text":"\\"created\\":17"}'
    )
    assert (
        answer.body
        == '{"created":<time>,"queue_ms":<time>,"decode_ms":null,"created_by":5,"text":"\\"created\\":17"}'
    )
    timed = normal(
        "{}", date="today", server_timing="queue;dur=0.1, decode;dur=22.5", openai_processing_ms="5", etag="x"
    )
    assert [value for _, value in timed.headers[1:]] == [
        "<time>",
        "queue;dur=<time>, decode;dur=<time>",
        "<time>",
        "<time>",
    ]
    for value in (
        '{"id":"cmpl-1"}',
        '{"system_fingerprint":"fp_0123456789"}',
        f'{{"text":"{A}"}}',
        '{"logprob":-0.12345}',
    ):
        assert normal(value).body == value


def test_a_length_is_compared_unless_it_hangs_on_a_placeholder() -> None:
    assert header(normal("{}", content_length="2"), "content-length") == "2"
    body = '{"created":5}'
    assert header(normal(body, content_length=str(len(body))), "content-length") == "<length of the body>"
    assert header(normal(body, content_length="99"), "content-length") == "99"


def test_when_to_come_back_is_compared_unless_it_is_worked_out() -> None:
    for body, expected in (('{"code":"server_overloaded"}', "<time>"), ('{"code":"compiler_busy"}', "5")):
        answer = Answer("HTTP/1.1 503 Service Unavailable", (("retry-after", "5"),), body.encode())
        assert normal_answers([answer], is_interleaved=False)[0].headers == (("retry-after", expected),)


def test_events_keep_their_order_within_each_choice() -> None:
    def event(index: int, text: str) -> str:
        return f'data: {{"id":"x","choices":[{{"index":{index},"text":"{text}"}}]}}\n\n'

    end = 'data: {"id":"x","choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    stream = event(1, "b") + ": keep-alive\n\n" + event(0, "z") + event(1, "a") + event(0, "y") + end
    sent = normal(stream, "text/event-stream; charset=utf-8").body
    assert sent == stream.replace(": keep-alive\n\n", "")
    ordered = normal(stream, "text/event-stream; charset=utf-8", is_interleaved=True).body
    assert ordered == event(0, "z") + event(0, "y") + event(1, "b") + event(1, "a") + end


def test_of_metrics_the_names_and_labels_stay() -> None:
    text = '# TYPE b counter\nb_total{x="1 2",le="+Inf"} 5.0\na 1e-05\nc{commit="abc",version="1"} 1.0\n'
    answer = normal(text, "text/plain; version=0.0.4; charset=utf-8")
    expected = ["# TYPE b counter", "a", 'b_total{x="1 2",le="+Inf"}', 'c{commit="<commit>",version="1"}']
    assert answer.body.split("\n") == expected


def test_bytes_that_are_no_text_and_long_files_are_compared_too() -> None:
    assert normal("x" * 30_000, "text/css").body.startswith("<30000 bytes, SHA-256 ")
    assert normal("x" * 30_000, "text/css") != normal("x" * 29_999 + "y", "text/css")
    png = Answer("HTTP/1.1 200 OK", (), b"\x89PNG")
    assert normal_answers([png], is_interleaved=False)[0].body == "\\x89PNG"


# -- recordings ----------------------------------------------------------------------------------------------


def test_every_difference_is_told_and_none_that_is_not_there(tmp_path: Path) -> None:
    answer = normal('{"a":1,"b":2}', server="x")
    recording = {name: Entry("request", (answer,)) for name in ("s/a/same", "s/a/other", "s/a/gone")}
    file = tmp_path / "recording.json"
    write_recording(file, recording, ROOT)
    commit, read = read_recording(file)
    assert len(commit.removesuffix("-dirty")) == 40
    assert read == recording
    assert list(differences(recording, read)) == []
    changes = {
        "body": replace(answer, body='{"a":1,"b":3}'),
        "blanks": replace(answer, body='{"a": 1,"b":2}'),
        "status": replace(answer, status_line="HTTP/1.1 201 Created"),
        "spelling of a header": replace(
            answer, headers=(("Content-Type", "application/json"), ("server", "x"))
        ),
        "order of headers": replace(answer, headers=answer.headers[::-1]),
    }
    for what, changed in changes.items():
        [difference] = differences(read, {**read, "s/a/other": Entry("request", (changed,))})
        assert difference.startswith("s/a/other:\n--- recorded\n+++ now\n"), what
    [difference] = differences(read, {**read, "s/a/other": Entry("another", (answer,))})
    assert "another request" in difference
    less = {name: entry for name, entry in read.items() if name != "s/a/gone"}
    assert list(differences(read, less)) == ["s/a/gone: only in the recording"]
    assert list(differences(less, read)) == ["s/a/gone: only sent now"]


def test_hundreds_of_exchanges_are_told_apart_by_their_names() -> None:
    assert set(AREAS) == {spec.name for spec in SERVERS}
    for server, areas in AREAS.items():
        for area, exchanges in areas.items():
            names = [exchange.name for exchange in exchanges]
            assert len(set(names)) == len(names), (server, area)
    for server in ("tiny", "demo"):
        assert sum(map(len, AREAS[server].values())) >= 300


def test_the_streamed_form_of_a_request_differs_in_nothing_else() -> None:
    whole = complete("a", cache_salt="é")
    streamed = whole.streamed()
    head, _, body = streamed.request.partition(b"\r\n\r\n")
    assert json.loads(body) == {**json.loads(whole.request.partition(b"\r\n\r\n")[2]), "stream": True}
    assert b"content-length: %d" % len(body) in head
    assert head.split(b"\r\n")[:-1] == whole.request.split(b"\r\n")[: head.count(b"\r\n")]


def test_nothing_of_the_server_or_of_other_tests_is_imported() -> None:
    """Both may be laid out anew between a recording and its comparison."""
    allowed = {*sys.stdlib_module_names, "numpy", "safetensors", "tokenizers", "tests.corpus"}
    for file in PACKAGE.rglob("*.py"):
        if file == Path(__file__):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                known = ".".join(name.split(".")[:2]) if name.startswith("tests.") else name.split(".")[0]
                assert known in allowed, f"{file.name} imports {name}"


@pytest.mark.slow
def test_a_server_says_the_same_twice() -> None:
    specs = chosen_servers(["poisoned"])
    first, second = (make_recording(specs, ROOT) for _ in range(2))
    assert list(differences(first, second)) == []
    [failed] = second["poisoned/failures/completion: at once"].answers
    assert failed.status_line == "HTTP/1.1 500 Internal Server Error"


# -- the wire ------------------------------------------------------------------------------------------------


def read(text: bytes, method: str = "GET") -> Answer:
    return read_answer(io.BufferedReader(io.BytesIO(text)), method)


def test_answers_are_read_in_every_framing() -> None:
    line = b"HTTP/1.1 200 OK\r\n"
    whole = read(line + b"Content-Length: 2\r\nA: b\r\nA: c\r\n\r\n{}rest")
    assert whole == Answer("HTTP/1.1 200 OK", (("Content-Length", "2"), ("A", "b"), ("A", "c")), b"{}")
    chunks = read(line + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n")
    assert chunks.body == b"abc0123456789"
    assert read(line + b"connection: close\r\n\r\nup to the end").body == b"up to the end"
    assert read(line + b"content-length: 5\r\n\r\n", "HEAD").body == b""
    assert read(b"HTTP/1.1 100 Continue\r\n\r\nHTTP").body == b""
    assert read(b"").status_line == CLOSED


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\ntrailer: x\r\n\r\n",
        b"HTTP/1.1 200 OK\nno header\r\n\r\n",
    ],
)
def test_an_answer_that_is_cut_or_wrong_is_an_error(answer: bytes) -> None:
    with pytest.raises(WireError):
        read(answer)
