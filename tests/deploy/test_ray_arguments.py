"""The arguments of the Ray Serve application, checked without Ray; ``python -m tests.ray_serve`` runs it."""

import pytest

from deploy.ray.arguments import RayArguments
from server.settings.settings import SettingsError


def test_a_replica_computes_with_the_cores_it_is_given() -> None:
    arguments = RayArguments.from_mapping({"num_cpus": 4, "settings": {"model": "m"}})
    assert arguments.settings.num_threads == 4
    assert arguments.num_gpus == 0
    assert (
        RayArguments.from_mapping({"num_cpus": 4, "settings": {"num_threads": 2}}).settings.num_threads == 2
    )


def test_gpus_are_those_of_the_tensor_parallel_group() -> None:
    assert RayArguments.from_mapping({"settings": {"device": "cuda"}}).num_gpus == 1
    assert RayArguments.from_mapping({"settings": {"device": "auto"}}).num_gpus == 0
    shared = RayArguments.from_mapping(
        {"num_cpus": 8, "settings": {"device": "cuda", "tensor_parallel_size": 4}}
    )
    assert shared.num_gpus == 4
    assert shared.settings.num_threads == 2, "each of the four processes has its share of the cores"


def test_a_replica_takes_what_it_would_not_refuse_itself() -> None:
    settings = {"max_num_seqs": 16, "max_queued_requests": 8, "shutdown_timeout": 120}
    arguments = RayArguments.from_mapping({"settings": settings})
    assert arguments.max_ongoing_requests == 24
    assert arguments.target_ongoing_requests == 12
    assert arguments.graceful_shutdown_seconds > 120
    unlimited = RayArguments.from_mapping({"settings": settings | {"max_queued_requests": 0}})
    assert unlimited.max_ongoing_requests > 100_000


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_replicas": 2}, ValueError, "num_replicas"),
        ({"settings": {"modle": "m"}}, ValueError, "modle"),
        ({"settings": {"port": "many"}}, SettingsError, "--port"),
        ({"min_replicas": 3, "max_replicas": 2}, ValueError, "min_replicas"),
        ({"num_cpus": 0}, ValueError, "num_cpus"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RayArguments.from_mapping(given)
