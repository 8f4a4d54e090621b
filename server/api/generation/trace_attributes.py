"""What the trace of a request says of it, in the names of OpenTelemetry's conventions for generative AI;
never prompts, never answers."""

from starlette.requests import Request

from server.api.generation.plan import GenerationPlan
from server.observability.tracing import Attribute


def trace_attributes(
    request: Request, plan: GenerationPlan, seed: int | None, model: str
) -> dict[str, Attribute]:
    """Sampling values are those in force; ``seed`` is the client's own."""
    sampling = plan.prompts[0].sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": max(prompt.sampling.max_tokens for prompt in plan.prompts),
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.choice.count": plan.n,
    }
    if seed is not None:
        attributes["gen_ai.request.seed"] = seed
    if plan.stop:
        attributes["gen_ai.request.stop_sequences"] = list(plan.stop)
    server = request.scope.get("server")
    if server is not None:
        address, port = server
        attributes["server.address"] = address
        if port is not None:
            attributes["server.port"] = port
    return attributes
