"""instructor, unchanged: a model's instance in each of its modes, whole, partial and in parts, over OpenAI's
client."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.http.clients import texts
from tests.http.clients.adapters import KEY, MODEL, need
from tests.http.live_server import LiveServer

USER = [{"role": "user", "content": "Weather?"}]


class Place(BaseModel):
    """Where and for how long."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


MODES = {
    "TOOLS": texts.RANDOM,
    "JSON_SCHEMA": texts.RANDOM,
    "JSON": texts.JSON,
    "MD_JSON": texts.FENCED_JSON,
    "RESPONSES_TOOLS": texts.RANDOM,
}


@pytest.fixture(scope="module")
def plain(wire: LiveServer) -> Iterator[openai.OpenAI]:
    need("instructor")
    with openai.OpenAI(base_url=f"{wire.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def patched(plain: openai.OpenAI, mode: str) -> Any:
    import instructor

    return instructor.from_openai(plain, mode=instructor.Mode[mode])


def asked(mode: str) -> dict[str, Any]:
    seed = {"extra_body": {"seed": MODES[mode]}} if mode.startswith("RESPONSES") else {"seed": MODES[mode]}
    return {"model": MODEL, "messages": USER, "temperature": 1, "max_retries": 0, **seed}


@pytest.mark.parametrize("mode", MODES)
def test_an_instance(plain: openai.OpenAI, mode: str) -> None:
    place, completion = patched(plain, mode).create_with_completion(response_model=Place, **asked(mode))
    assert isinstance(place, Place)
    assert completion.usage.total_tokens > 0


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "RESPONSES_TOOLS"])
def test_a_partial_stream(plain: openai.OpenAI, mode: str) -> None:
    *_, last = patched(plain, mode).create_partial(response_model=Place, **asked(mode))
    assert Place.model_validate(last.model_dump())


@pytest.mark.parametrize(("mode", "seed"), [("TOOLS", texts.PLACES_CALL), ("JSON_SCHEMA", texts.TWO_PLACES)])
def test_a_stream_of_instances(plain: openai.OpenAI, mode: str, seed: int) -> None:
    found = patched(plain, mode).create_iterable(response_model=Place, **{**asked(mode), "seed": seed})
    assert list(found) == [Place(city="Paris", days=2), Place(city="Rome", days=1)]


def test_calls_in_parallel(plain: openai.OpenAI) -> None:
    from collections.abc import Iterable

    class get_weather(Place):  # noqa: N801 -- the function that the scripted text calls
        """The weather."""

    class get_time(BaseModel):  # noqa: N801
        """The time."""

    found = patched(plain, "PARALLEL_TOOLS").create(
        response_model=Iterable[get_weather | get_time],
        **{**asked("TOOLS"), "seed": texts.TWO_CALLS, "tool_choice": "auto"},
    )
    assert [type(item).__name__ for item in found] == ["get_weather", "get_time"]


def test_a_refusal(plain: openai.OpenAI) -> None:
    from instructor.core.exceptions import InstructorRetryException

    with pytest.raises((openai.NotFoundError, InstructorRetryException), match="does not exist"):
        patched(plain, "TOOLS").create(response_model=Place, **{**asked("TOOLS"), "model": "gpt-x"})
