"""What the HTTP layer knows about the server's life: loading, ready, draining, dead. One object per
application, changed in the event loop only; ``is_stopping`` also by the handler of signals, between any two
of the loop's own instructions."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

from server.admission import AdmissionControl
from server.engine.async_engine import AsyncEngine
from server.engine.memory_readings import MemoryReadings
from server.errors import ApiError, model_not_ready, shutting_down
from server.loading.load import LoadedEngine
from server.observability.metrics import Metrics
from server.observability.tracing import RequestTracer
from server.settings.settings import Settings
from server.version import __version__

Status = Literal["ok", "loading", "stalled", "draining", "dead"]

# Two prompts at a time are encoded outside the event loop; more threads would only take cores from the model.
ENCODING_THREADS = 2


@dataclass(eq=False)
class ServerState:
    settings: Settings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    phase: str = "starting"
    loaded: LoadedEngine | None = None
    load_error: BaseException | None = None
    is_stopping: bool = False
    memory: MemoryReadings | None = None
    tracer: RequestTracer | None = None
    loaded_once: asyncio.Event = field(default_factory=asyncio.Event)  # the model is there
    admission: AdmissionControl = field(init=False)
    encoding_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(ENCODING_THREADS)
    )

    def __post_init__(self) -> None:
        settings = self.settings
        self.admission = AdmissionControl(
            settings.max_queued_requests, settings.max_queued_prompt_tokens, int(settings.overload_status)
        )

    @property
    def engine(self) -> AsyncEngine | None:
        return None if self.loaded is None else self.loaded.engine

    @property
    def is_dead(self) -> bool:
        return self.load_error is not None or (self.loaded is not None and self.loaded.engine.is_dead)

    @property
    def is_loading(self) -> bool:
        """The loading thread is at work, also after the server was told to stop."""
        return self.loaded is None and self.load_error is None

    @property
    def is_draining(self) -> bool:
        return self.status == "draining"

    @property
    def is_ready(self) -> bool:
        return self.status == "ok"

    @property
    def status(self) -> Status:
        if self.is_dead:
            return "dead"
        if self.is_stopping:
            return "draining"
        if self.loaded is None:
            return "loading"
        if not self.loaded.engine.is_ready:
            return "draining"
        return "stalled" if self.loaded.engine.is_stalled else "ok"

    def refusal(self) -> ApiError | None:
        """Why no request can be taken now."""
        match self.status:
            case "ok" | "stalled":  # requests wait for the long step like those that came before
                return None
            case "draining":
                return shutting_down()
            case "dead":
                return model_not_ready("The engine has stopped after an error; the server must be restarted.")
            case _:
                return model_not_ready(
                    f"The model is still loading (phase: {self.phase}). Try again in a few seconds."
                )

    def require_loaded(self) -> LoadedEngine:
        """The engine, ready to take a request. Raises ApiError (503) otherwise."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        assert self.loaded is not None
        return self.loaded

    @property
    def system_fingerprint(self) -> str:
        """Changes whenever the same seed may give another text: other weights, another dtype, another
        version."""
        assert self.loaded is not None
        identity = f"{self.loaded.fingerprint}|{self.loaded.model_info.get('dtype')}|{__version__}"
        return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]

    def effective_default(self, name: str, fallback: Any) -> Any:
        """The default of a sampling parameter: the model's own, else the given one."""
        value = None if self.loaded is None else self.loaded.default_sampling.get(name)
        return fallback if value is None else value

    # What a scrape reads, see engine_metrics.EngineView.
    @property
    def queue_limit(self) -> int:
        return self.settings.max_queued_requests

    @property
    def info(self) -> Mapping[str, Mapping[str, str]]:
        if self.loaded is None:
            return {}
        return {"model_info": self.loaded.model_info, "cache_config_info": self.loaded.cache_info}

    @property
    def startup_seconds(self) -> Mapping[str, float]:
        return {} if self.loaded is None else self.loaded.startup_seconds

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {} if self.memory is None else self.memory.latest
