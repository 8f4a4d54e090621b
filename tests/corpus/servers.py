"""The servers that are asked: what each is started with, and its process. Answers must depend on nothing but
the requests, so every one computes in float32, whatever the processor would choose, and says itself what
would else be measured."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.corpus.exchange import get
from tests.corpus.tiny_model import write_tiny_model
from tests.corpus.wire import Ports, WireError, exchange_answers

START_SECONDS = 600  # the first start on a machine compiles the kernels
END_SECONDS = 60
KEYS = ("corpus-key-1", "corpus-key-2")
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' ~ message.role ~ '\n' }}
{%- if message.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{{- message.content }}{{ '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_COMMON = ("--dtype", "float32", "--num-threads", "1", "--block-size", "16", "--shutdown-timeout", "5")
_TINY = (*_COMMON, "--no-weight-cache", "--served-model-name", "tiny", "tiny-2")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """``model``: one of random weights that is written first, or the demo model that the server brings
    along."""

    name: str
    model: Literal["tiny", "poisoned", "demo"]
    flags: tuple[str, ...]
    has_metrics_port: bool = False
    has_template: bool = False


SERVERS = (
    ServerSpec(
        "tiny",
        "tiny",
        (*_TINY, "--max-model-len", "2048", "--kv-cache-memory", "256MiB", "--max-num-batched-tokens", "256"),
    ),
    ServerSpec(
        "strict",
        "tiny",
        (
            *(*_TINY, "--max-model-len", "512", "--kv-cache-memory", "64MiB", "--api-key", *KEYS),
            *("--strict-params", "--strict-roles", "--strict-context", "--no-prefix-caching"),
            *("--scheduling-policy", "priority", "--metrics-compat", "vllm"),
            *("--allowed-hosts", "models.example", "--read-timeout", "2", "--max-num-seqs", "4"),
        ),
        has_metrics_port=True,
        has_template=True,
    ),
    ServerSpec(
        "full",
        "tiny",
        (
            *(*_TINY, "--max-model-len", "32768", "--kv-cache-memory", "256MiB", "--max-num-seqs", "1"),
            *("--max-queued-requests", "1", "--max-queued-prompt-tokens", "64", "--overload-status", "429"),
        ),
    ),
    ServerSpec("poisoned", "poisoned", (*_TINY, "--max-model-len", "512", "--kv-cache-memory", "64MiB")),
    ServerSpec(
        "demo",
        "demo",
        (
            *(*_COMMON, "--quantization", "int8", "--no-weight-cache"),
            *("--max-model-len", "1024", "--kv-cache-memory", "1GiB", "--max-num-batched-tokens", "256"),
        ),
    ),
)


@contextlib.contextmanager
def server_process(spec: ServerSpec, root: Path, folder: Path) -> Iterator[Ports]:
    """``gemserve serve`` of the tree ``root``, ready; ``folder`` is empty and takes its model and its log. It
    must end with 0 after SIGTERM."""
    ports = {"api": _free_port()}
    arguments = [*spec.flags, "--port", str(ports["api"])]
    if spec.model != "demo":
        arguments.insert(0, str(write_tiny_model(folder / spec.model, is_poisoned=spec.model == "poisoned")))
    if spec.has_metrics_port:
        ports["metrics"] = _free_port()
        arguments += ["--metrics-port", str(ports["metrics"])]
    if spec.has_template:
        (folder / "template.jinja").write_text(TEMPLATE)
        arguments += ["--chat-template", str(folder / "template.jinja")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GEMSERVE_")}
    environ["PYTHONPATH"] = str(root)
    command = [sys.executable, "-m", "server", "serve", *arguments]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=root, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, ports)
        yield ports
        process.terminate()
        code = process.wait(timeout=END_SECONDS)
        if code:
            raise ServerError(f"it ended with {code}")
    except (ServerError, WireError, OSError) as error:
        raise ServerError(f"the server {spec.name!r} of {root}: {error}; its log:\n{_end_of(log)}") from error
    finally:
        process.kill()
        process.wait()


class ServerError(Exception):
    """A server did not start, did not answer or did not end as it should; the text has the end of its log."""


def _wait_until_ready(process: "subprocess.Popen[bytes]", ports: Ports) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):  # not yet bound
            [answer] = exchange_answers(get("/health/ready"), ports)
            if answer.status == 200:
                return
        time.sleep(0.05)
    raise ServerError("it did not become ready")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def chosen_servers(names: Sequence[str]) -> list[ServerSpec]:
    """Those of the names, all where there are none."""
    return [spec for spec in SERVERS if not names or spec.name in names]
