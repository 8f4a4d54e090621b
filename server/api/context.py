"""How a route finds the server's state and the id of its request."""

from starlette.requests import Request

from server.state import ServerState


def state_of(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def request_id_of(request: Request) -> str:
    """Set by RequestContextMiddleware."""
    return str(request.scope.get("gemserve.request_id", "-"))
