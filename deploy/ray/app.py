"""gemserve on Ray Serve: the same FastAPI application, one replica per engine.

A Serve configuration names it with ``import_path: deploy.ray.app:build``; its ``args`` are those of
``RayArguments``. Ray starts and replaces replicas, spreads requests over them (those that name the same
session to the same one) and scales by requests in flight. A replica takes requests once its model is loaded;
one whose engine died is replaced; one that is scaled away finishes its streams first.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from deploy.ray.arguments import RayArguments
from server.app import create_app
from server.loading.threads import configure_threads
from server.settings.settings import Settings
from server.state import ServerState

# Requests that name the same session in the header x-session-id (RAY_SERVE_SESSION_ID_HEADER_KEY on the nodes
# names another) go to the same replica, whose cache holds what was said before. Those without are spread
# evenly.
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def create_replica_app(settings: Settings) -> FastAPI:
    """The application, whose start ends when the model is loaded: until then Serve sends it nothing. Fails
    when loading does."""
    configure_threads()
    app = create_app(settings)
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def loaded_lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            state: ServerState = app.state.server
            while state.is_loading:  # noqa: ASYNC110 - the loading thread changes a plain state, which has no event
                await asyncio.sleep(0.05)
            if state.load_error is not None:
                raise RuntimeError(f"the model cannot be served: {state.load_error}") from state.load_error
            yield

    app.router.lifespan_context = loaded_lifespan
    return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application. Raises ValueError or SettingsError for arguments that are wrong."""
    arguments = RayArguments.from_mapping(args)
    settings = arguments.settings

    def create() -> FastAPI:
        return create_replica_app(settings)

    class Gemserve:
        """One replica: an engine, and the application in front of it."""

        app: FastAPI  # set by serve.ingress

        async def check_health(self) -> None:
            """Raises once the engine is dead, so that Serve replaces the replica."""
            state: ServerState = self.app.state.server
            if state.is_dead:
                raise RuntimeError(
                    f"the engine has stopped: {state.engine.error if state.engine else state.load_error}"
                )

    deployment: serve.Deployment = serve.deployment(
        serve.ingress(create)(Gemserve),
        name="gemserve",
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            initial_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.target_ongoing_requests,
            upscale_delay_s=arguments.upscale_delay_seconds,
            downscale_delay_s=arguments.downscale_delay_seconds,
        ),
        max_ongoing_requests=arguments.max_ongoing_requests,
        request_router_config=RequestRouterConfig(request_router_class=SESSION_ROUTER),
        graceful_shutdown_timeout_s=arguments.graceful_shutdown_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
    )
    return deployment.bind()
