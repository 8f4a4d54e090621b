"""The process of ``gemserve serve`` when loading fails, or the engine dies or hangs."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from model.interface.errors import ConfigError, ModelError
from model.parallel.ranks import RankError
from server.app import create_app
from server.cli import serving
from server.settings.settings import Settings
from tests.fakes import BOS, HANG
from tests.model.checkpoint.conftest import random_weights, write_gguf
from tests.server.cli.processes import ROOT
from tests.server.cli.serve_process import start, wait_until_ready


def test_a_failed_load_ends_the_process_with_one_line() -> None:
    with start("bad_weights") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.rstrip().endswith(
        "gemserve: error: model.safetensors: tensor model.norm.weight is truncated"
    )
    assert "Traceback" not in error


def test_a_full_disk_ends_the_start_with_one_line(tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk: the converted tokenizer fits neither into the cache
    nor elsewhere."""
    model = write_gguf(tmp_path / "tiny.gguf", random_weights())
    script = (
        "import resource, sys; from server.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        f"sys.exit(main(['serve', {str(model)!r}, '--port', '0', '--cache-dir', "
        f"{str(tmp_path / 'cache')!r}]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.rstrip().splitlines()[-1]
    assert last.startswith("gemserve: error: The converted tokenizer")
    assert "Free some space or set GEMSERVE_CACHE" in last
    assert "Traceback" not in ended.stderr


def test_a_dead_engine_ends_the_process() -> None:
    with start("dying_engine") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.rstrip().endswith("gemserve: error: RuntimeError: out of memory in a step")


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_step_that_hangs_ends_the_process(is_told_to_stop: bool) -> None:
    with start("fake_model", step_timeout=1) as process:
        port = wait_until_ready(process)
        url = f"http://127.0.0.1:{port}"
        began = time.monotonic()
        body = {"prompt": [BOS, *[HANG] * 11], "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_text()
            next(chunks)
            if is_told_to_stop:
                process.send_signal(signal.SIGTERM)
            events = "".join(chunks).split("\n\n")
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - began < 50, "the step itself takes a minute"
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"code":"internal_error"' in events[-3]
    assert process.returncode == 1
    assert error.rstrip().endswith(
        "gemserve: error: EngineHungError: a step of the model did not end within 1 seconds"
    )
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_end_at_once_takes_children_that_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(gone.pid)
    gone.wait()
    codes: list[int] = []
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [process])
    monkeypatch.setattr("server.cli.serving.os._exit", codes.append)
    monkeypatch.setattr("server.cli.serving.logging.shutdown", lambda: None)
    leave: Callable[[int], object] = serving.exit_at_once  # which returns here, since os._exit does
    leave(130)
    assert codes == [130]


@pytest.mark.parametrize(
    ("error", "is_left"), [(RankError("rank 1 has ended"), True), (ConfigError("--flag is wrong"), False)]
)
def test_a_loading_thread_that_waits_for_a_rank_is_not_waited_for(error: ModelError, is_left: bool) -> None:
    """Where a rank ends while a model is loaded, rank 0's thread is left in native code: interpreter and it
    must not meet."""
    app = create_app(Settings())
    app.state.server.load_error = error
    assert serving.Server(uvicorn.Config(app), app.state.server, None).has_native_work is is_left
