"""Two Ray nodes on this machine with the application of deploy/ray on them, and who serves which session."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from safetensors.torch import save_file

from deploy.ray.app import build
from model.checkpoint.base import expected_shapes
from model.config.gemma3_config import Gemma3Config
from tests.deploy.kustomize import ROOT
from tests.deploy.replicas import wait_until
from tests.ports import free_port
from tests.server.text.small_tokenizer import build_library_tokenizer
from tests.tiny import HF_CONFIG

# Large enough that the model's steps, and not HTTP, are what a replica's core is busy with.
CONFIG = HF_CONFIG | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}
DEPLOYMENT = "gemserve"


def arguments(model: Path, replicas: int) -> dict[str, Any]:
    settings = {
        "model": str(model),
        "served_model_name": ["tiny"],
        "dtype": "float32",
        "kv_cache_memory": "256MiB",
    }
    return {
        "num_cpus": 1,
        "min_replicas": replicas,
        "max_replicas": replicas,
        "settings": settings | {"shutdown_timeout": 60},
    }


def write_model(folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(Gemma3Config.from_hf(CONFIG))
    save_file(
        {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    build_library_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's process, known by when it started: its metrics say so."""

    process: psutil.Process

    @property
    def started(self) -> float:
        return self.process.create_time()

    def pin(self, core: int) -> None:
        for thread in self.process.threads():
            os.sched_setaffinity(thread.id, {core})


class RayServe:
    def __init__(self, cluster: Cluster, second_node: Any, model: Path, port: int) -> None:
        self.cluster = cluster
        self.second_node = second_node
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        self._model = model

    def deploy(self, replicas: int) -> None:
        """Start to bring the application to so many replicas."""
        serve.run(build(arguments(self._model, replicas)), name=DEPLOYMENT, route_prefix="/", blocking=False)

    def num_running(self) -> int:
        status = serve.status().applications[DEPLOYMENT].deployments[DEPLOYMENT]
        return status.replica_states.get("RUNNING", 0)

    def wait_for_replicas(self, count: int) -> None:
        wait_until(lambda: self.num_running() == count, f"{count} replicas run", 240)

    def replicas(self) -> list[Replica]:
        """By the node's order of start."""
        named = f"ray::ServeReplica:{DEPLOYMENT}:{DEPLOYMENT}"
        found = [
            p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or []).startswith(named)
        ]
        return sorted((Replica(process) for process in found), key=lambda replica: replica.started)

    def replica_of(self, session: str, replicas: list[Replica]) -> int:
        """Index of the replica that serves a session."""
        text = self.client.get("/metrics", headers={"x-session-id": session}).text
        started = next(
            float(line.split()[1])
            for line in text.splitlines()
            if line.startswith("process_start_time_seconds ")
        )
        return min(range(len(replicas)), key=lambda index: abs(replicas[index].started - started))

    def sessions(self, replicas: list[Replica], count: int) -> list[list[str]]:
        """So many sessions of each replica."""
        found: list[list[str]] = [[] for _ in replicas]
        for number in range(64 * count):
            place = found[self.replica_of(f"session-{number}", replicas)]
            if len(place) < count:
                place.append(f"session-{number}")
            if all(len(place) == count for place in found):
                return found
        raise AssertionError(f"the router favours one replica: {[len(place) for place in found]}")

    def is_on_head(self, replica: Replica) -> bool:
        """Workers are started by the raylet of their node."""
        raylet = self.cluster.head_node.all_processes["raylet"][0].process.pid
        return raylet in {parent.pid for parent in replica.process.parents()}

    def kill_second_node(self) -> None:
        self.cluster.remove_node(self.second_node, allow_graceful=False)

    def add_second_node(self) -> None:
        self.second_node = self.cluster.add_node(num_cpus=1)


@contextlib.contextmanager
def ray_serve(model: Path) -> Iterator[RayServe]:
    """A head with the proxy and one core for a replica, and a second node with another."""
    os.environ["PYTHONPATH"] = str(ROOT)  # of the replicas
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second_node = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        running = RayServe(cluster, second_node, model, port)
        try:
            running.deploy(2)
            running.wait_for_replicas(2)
            yield running
        finally:
            running.client.close()
            serve.shutdown()
            ray.shutdown()
    finally:
        cluster.shutdown()
