"""The field ``priority``: which requests are started first."""

from server.errors import invalid_value
from server.settings.settings import Settings


def checked_priority(settings: Settings, priority: int | None) -> int:
    """Lower is earlier, 0 the default. Raises ApiError where the server takes requests as they come: a client
    that relies on another order has to know."""
    if priority and settings.scheduling_policy != "priority":
        reason = (
            f"this server starts requests in the order in which they come, got {priority}. Leave it out or "
            "set it to 0; --scheduling-policy priority turns priorities on"
        )
        raise invalid_value("priority", reason)
    return priority or 0
