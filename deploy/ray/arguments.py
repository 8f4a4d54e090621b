"""The arguments of the Ray Serve application: gemserve's own settings, and what Ray is told about replicas.
Imports no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from server.settings.settings import SETTINGS, Settings

UNLIMITED = 1_000_000  # in place of gemserve's 0, which Ray has no word for


@dataclass(frozen=True, slots=True, kw_only=True)
class RayArguments:
    """``num_cpus`` are the cores of one replica, and its computing threads unless the settings say
    otherwise."""

    settings: Settings
    num_cpus: float = 1
    min_replicas: int = 1
    max_replicas: int = 1
    # Requests in a replica, running and waiting, above which another one is started. None: three quarters of
    # what it can run.
    target_ongoing_requests: float | None = None
    upscale_delay_seconds: float = 30.0
    downscale_delay_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.num_cpus <= 0:
            raise ValueError(f"num_cpus must be above 0, got {self.num_cpus}")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"expected 1 <= min_replicas <= max_replicas, got {self.min_replicas} and {self.max_replicas}"
            )
        if self.target_ongoing_requests is None:
            object.__setattr__(self, "target_ongoing_requests", max(1.0, 0.75 * self.settings.max_num_seqs))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From the ``args`` of a Serve configuration. ``settings`` are keys of gemserve's configuration file.
        Raises ValueError for an unknown name, SettingsError for a wrong value."""
        values = dict(given)
        settings = dict(values.pop("settings", {}))
        _check_names("args", values, {item.name for item in fields(cls)} - {"settings"})
        _check_names("args.settings", settings, {item.name for item in SETTINGS})
        # The proxies in front take the connections, under names of their own: the check of the Host header
        # for servers on a loopback address does not apply.
        settings.setdefault("host", "0.0.0.0")
        checked = Settings(**settings)
        if checked.num_threads is None:
            num_threads = max(1, int(values.get("num_cpus", 1)) // checked.tensor_parallel_size)
            checked = replace(checked, num_threads=num_threads)
        return cls(settings=checked, **values)

    @property
    def num_gpus(self) -> int:
        """A replica without a share of a GPU sees none, so that "auto" means the CPU here."""
        return self.settings.tensor_parallel_size if self.settings.device == "cuda" else 0

    @property
    def max_ongoing_requests(self) -> int:
        """As many as the replica takes before it would answer 429 itself; more wait in the proxies for a free
        replica."""
        return self.settings.max_num_seqs + (self.settings.max_queued_requests or UNLIMITED)

    @property
    def graceful_shutdown_seconds(self) -> float:
        """What a replica that is scaled away gets to finish its streams."""
        return self.settings.shutdown_timeout + 5


def _check_names(place: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{place}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
