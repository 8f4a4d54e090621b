"""What the model of the clients' server says, by seed: the texts of the tools' tests, and some for these."""

from tests.http import tool_requests as tools

ARGUMENTS = tools.ARGUMENTS
_TWO_PLACES = '{"tasks":[{"city":"Paris","days":2},{"city":"Rome","days":1}]}'
_OWN = [
    " the sun — né",
    f"```json\n{ARGUMENTS}\n```",
    ARGUMENTS,
    _TWO_PLACES,
    f'{{"name":"IterablePlace","parameters":{_TWO_PLACES}}}',
]
TEXTS = [*tools.TEXTS, *_OWN]
ONLY_CALL, PLAIN, TWO_CALLS, FAILING, FAILING_AT_ONCE = (
    tools.ONLY_CALL,
    tools.PLAIN,
    tools.TWO_CALLS,
    tools.FAILING,
    tools.FAILING_AT_ONCE,
)
SUN, FENCED_JSON, JSON, TWO_PLACES, PLACES_CALL = range(len(tools.TEXTS), len(TEXTS))
RANDOM = tools.RANDOM  # and beyond: seeds without a script
