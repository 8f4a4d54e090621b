"""How a route finds the server's state and the id of its request."""

from dataclasses import dataclass

from starlette.requests import Request

from server.state import ServerState

REQUEST_ID_KEY = "gemserve.request_id"


@dataclass(slots=True)
class RequestId:
    """What the header ``x-request-id`` of the answer says: the client's own id, else one of ours."""

    value: str
    is_given: bool = False

    def adopt(self, response_id: str) -> None:
        """The id in an answer's body is its request's id, unless the client chose one."""
        if not self.is_given:
            self.value = response_id


def state_of(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def request_id_of(request: Request) -> RequestId:
    """Set by RequestContextMiddleware."""
    request_id = request.scope[REQUEST_ID_KEY]
    assert isinstance(request_id, RequestId)
    return request_id
