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
from model.config.gemma3_config import Gemma3Config
from model.config.tensors import checkpoint_tensors
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
        "settings": settings | {"shutdown_timeout": 600},
    }


def write_model(folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = checkpoint_tensors(Gemma3Config.from_hf(CONFIG))
    save_file(
        {spec.name: 0.05 * torch.randn(spec.shape, generator=generator) for spec in tensors},
        folder / "model.safetensors",
    )
    build_library_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica's process, known by when it started: its metrics say so, to a hundredth of a second."""

    process: psutil.Process

    @property
    def started(self) -> float:
        return self.process.create_time()

    @property
    def processor_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


class RayServe:
    def __init__(self, cluster: Cluster, model: Path, port: int) -> None:
        self.cluster = cluster
        self.second_node: Any = None
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        self._model = model

    def deploy(self, replicas: int) -> None:
        """Start to bring the application to so many replicas."""
        application = build(arguments(self._model, replicas))
        # Serve gives each run a version of its own and replaces every replica of another one: here those that
        # stay do stay.
        application._bound_deployment._version = "1"
        serve.run_many(
            [serve.RunTarget(application, name=DEPLOYMENT, route_prefix="/")],
            wait_for_applications_running=False,
        )

    def num_running(self) -> int:
        status = serve.status().applications[DEPLOYMENT].deployments[DEPLOYMENT]
        return int(status.replica_states.get("RUNNING", 0))

    def wait_for_replicas(self, count: int) -> None:
        """A dead replica runs in the eyes of Serve until it looks at it, but has no process."""
        wait_until(lambda: self.num_running() == count == len(self.replicas()), f"{count} replicas run", 240)

    def replicas(self) -> list[Replica]:
        """By the order of their start."""
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
        matches = [index for index, replica in enumerate(replicas) if abs(replica.started - started) < 0.005]
        assert len(matches) == 1, (
            f"{session} is served by the process started at {started}: replicas {matches} of {replicas}"
        )
        return matches[0]

    def sessions(self, replicas: list[Replica], count: int) -> list[list[str]]:
        """So many sessions of each replica."""
        names = [f"session-{number}" for number in range(32 * count)]

        def are_all_reached() -> bool:
            return {self.replica_of(name, replicas) for name in names} == set(range(len(replicas)))

        # The proxy hears of a new replica after it runs, and then gives it sessions that were another's.
        wait_until(are_all_reached, "the proxy spreads sessions over all replicas")
        found: list[list[str]] = [[] for _ in replicas]
        for name in names:
            found[self.replica_of(name, replicas)].append(name)
        assert all(len(place) >= count for place in found), (
            f"the router favours one replica: {[len(place) for place in found]}"
        )
        return [place[:count] for place in found]

    def is_on_head(self, replica: Replica) -> bool:
        """Workers are started by the raylet of their node."""
        raylet = self.cluster.head_node.all_processes["raylet"][0].process.pid
        return raylet in {parent.pid for parent in replica.process.parents()}

    def add_second_node(self) -> None:
        """A node for one replica, and that replica on it. It starts alone, since replicas are told apart by
        when they started."""
        self.wait_for_replicas(1)
        self.second_node = self.cluster.add_node(num_cpus=1)
        self.wait_for_replicas(2)

    def kill_second_node(self) -> None:
        self.cluster.remove_node(self.second_node, allow_graceful=False)
        wait_until(lambda: len(self.replicas()) == 1, "the replica died with its node")


@contextlib.contextmanager
def ray_serve(model: Path) -> Iterator[RayServe]:
    """A head with the proxy and one core for a replica, and then a second node with another."""
    os.environ["PYTHONPATH"] = str(ROOT)  # of the replicas
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        running = RayServe(cluster, model, port)
        try:
            running.deploy(2)
            running.add_second_node()
            yield running
        finally:
            running.client.close()
            serve.shutdown()
            ray.shutdown()
    finally:
        cluster.shutdown()
