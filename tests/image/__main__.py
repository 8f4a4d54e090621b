"""``python -m tests.image``: builds the image, starts it as its user on a read-only root, asks it, streams,
and ends it with SIGTERM in the middle of a stream. Says what was checked, one line each; ends with 1 at the
first thing that is wrong."""

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import httpx

from tests.image.build import ROOT, build_image, image_config, make_base, require_tools
from tests.image.container import Container, mounted_image
from tests.ports import free_port
from tests.tiny import write_tiny_folder

# Far more than are computed between the signal and the first refusal, on a quick machine and a slow one. It
# is checked that the stream is still under way then.
STREAM_TOKENS = 6000


def passed(what: str) -> None:
    print(f"image: {what}", flush=True)


def check_config(config: dict[str, Any]) -> None:
    user = config["User"].split(":")
    assert len(user) == 2, config["User"]
    assert all(part.isdigit() and int(part) > 0 for part in user), (
        f"{config['User']} is not a numeric user other than root"
    )
    assert config["Entrypoint"][0].endswith("tini"), config["Entrypoint"]
    assert config["Healthcheck"]["Test"] == ["CMD", "gemserve", "health"], config.get("Healthcheck")
    assert set(config["Volumes"]) == {"/models", "/cache"}, config["Volumes"]
    passed("the configuration names a numeric user, tini, the health check and both mounts")


def wait_until_ready(container: Container, client: httpx.Client, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if client.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # does not listen yet
        assert container.is_running, "the container has ended"
        assert time.monotonic() < deadline, "not ready in time"
        time.sleep(0.2)


def check_process(container: Container, config: dict[str, Any]) -> None:
    status = container.status_of(container.first_process)
    assert status["Uid"].split() == 4 * [config["User"].split(":")[0]], status["Uid"]
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, "the process holds capabilities"
    assert status["NoNewPrivs"] == "1"
    for folder in ("/", "/opt/gemserve", "/models", "/tmp"):
        assert container.execute("touch", f"{folder}/written").returncode != 0, f"{folder} can be written to"
    passed("runs as its user without capabilities; only /cache can be written to")


def check_kernels(container: Container) -> None:
    files = container.execute(
        "sh", "-c", "ls /opt/gemserve/lib/python3*/site-packages/model/ops/cpu/prebuilt/*.so"
    ).stdout.split()
    assert {Path(file).name.rsplit("-", 1)[0] for file in files} == {
        "ext-avx2",
        "ext-avx512",
        "ext-avx512_vnni",
    }, files
    log = container.log.read_text(encoding="utf-8")
    assert "Compiling" not in log, log
    assert "g++" not in log, log
    passed("uses the kernels that it was built with")


def check_health(container: Container) -> None:
    probe = container.execute("gemserve", "health")
    assert probe.returncode == 0, probe.stderr
    passed(f"its own health check says {probe.stdout.strip()}")


def status_of(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> int | None:
    """Of the answer to a request on a connection of its own; None where the server takes no connection any
    more."""
    try:
        return client.request(method, path, json=body, headers={"connection": "close"}).status_code
    except (
        httpx.NetworkError,
        httpx.RemoteProtocolError,
    ):  # the latter: it was open when the server closed the idle ones
        return None


def metrics_address(container: Container) -> str:
    """They are there until the end of the drain, when the API's own port is closed."""
    found = re.search(
        r"metrics on http://0\.0\.0\.0:(\d+)/metrics", container.log.read_text(encoding="utf-8")
    )
    assert found is not None, "the log does not name the address of the metrics"
    return f"http://127.0.0.1:{found[1]}/metrics"


def check_drain(container: Container, client: httpx.Client) -> None:
    """Once the signal has reached the server, which its readiness shows, a new request is refused. The stream
    that is under way then ends complete, and the process with 0."""
    body = {"prompt": "once", "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    short = body | {"max_tokens": 1}
    assert client.post("/v1/completions", json=short).status_code == 200
    with (
        client.stream("POST", "/v1/completions", json=streamed) as response,
        httpx.Client(base_url=client.base_url, timeout=60) as other,
    ):
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        received = [next(lines)]
        container.terminate()
        deadline = time.monotonic() + 300
        while status_of(other, "GET", "/health/ready") == 200:
            assert time.monotonic() < deadline, "SIGTERM does not reach the server"
        refusal = status_of(other, "POST", "/v1/completions", short)
        assert refusal in (503, None), f"a request after SIGTERM got {refusal}"
        metrics = httpx.get(metrics_address(container), timeout=60).text.splitlines()
        assert "gemserve_draining 1.0" in metrics
        assert "gemserve_requests_running 1.0" in metrics, "the stream was over before a request was refused"
        received += [line for line in lines if line]
    events = [line.removeprefix("data: ") for line in received if line]
    assert events[-1] == "[DONE]", events[-1]
    usage = json.loads(events[-2])["usage"]
    assert usage["completion_tokens"] == STREAM_TOKENS, usage
    code = container.wait(360)
    assert code == 0, f"exit code {code}"
    told = "no connection" if refusal is None else str(refusal)
    passed(
        f"SIGTERM: a new request got {told}, the open stream all of its {STREAM_TOKENS} tokens, exit code 0"
    )


def check(image: str, folder: Path) -> None:
    config = image_config(image)
    check_config(config)
    models = write_tiny_folder(folder / "models")
    for path in (folder, models, *models.iterdir()):  # read by another user than the one who wrote them
        path.chmod(0o755 if path.is_dir() else 0o644)
    port = free_port()
    variables = {"GEMSERVE_PORT": str(port), "GEMSERVE_NUM_THREADS": "1", "GEMSERVE_DTYPE": "float32"}
    variables |= {
        "GEMSERVE_KV_CACHE_MEMORY": "64MiB",
        "GEMSERVE_SHUTDOWN_TIMEOUT": "300",
        "GEMSERVE_METRICS_PORT": "0",
    }
    with mounted_image(image) as root:
        container = Container(root, config, models, variables, folder / "server.log")
        try:
            container.start()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait_until_ready(container, client, 300)
                passed("answers /health/ready")
                check_process(container, config)
                check_kernels(container)
                check_health(container)
                check_drain(container, client)
        except BaseException:
            if container.log.exists():
                log = container.log.read_text(encoding="utf-8")
                print(f"image: the end of the server's log:\n{log[-4000:]}", file=sys.stderr)
            raise
        finally:
            container.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.image", description=__doc__)
    parser.add_argument("--image", help="check this image of buildah's store instead of building one")
    parser.add_argument("--base-image", help="build on this image instead of one made by mmdebstrap")
    parser.add_argument("--variant", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--torch-index-url", default="", help="where torch's wheels are, when pip's own index lacks them"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "image", help="keeps the base between runs"
    )
    arguments = parser.parse_args()
    require_tools()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        image = arguments.image
        if image is None:
            base_image = arguments.base_image or make_base(arguments.folder)
            image = build_image(arguments.folder, base_image, arguments.variant, arguments.torch_index_url)
        with tempfile.TemporaryDirectory(prefix="gemserve-image-") as folder:
            check(image, Path(folder))
    except Exception:
        traceback.print_exc()
        print("image: FAILED", file=sys.stderr)
        return 1
    passed("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
