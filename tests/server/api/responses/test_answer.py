"""Usage and shapes of a response that need no request."""

from server.api.generation.tool_schemas import ToolChoice
from server.api.responses.answer import _shown_choice, _shown_tool, wire_usage
from tests.server.api.events import usage


def test_usage_counts_the_cache_in_its_details() -> None:
    assert wire_usage(usage(prompt=10, completion=4, cached=8)) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }


def test_a_choice_of_tools_is_shown_as_it_was_asked_for() -> None:
    assert _shown_choice(None) == "auto"
    assert _shown_choice(ToolChoice("required")) == "required"
    assert _shown_choice(ToolChoice("required", ("add",), is_named=True)) == {
        "type": "function",
        "name": "add",
    }
    allowed = _shown_choice(ToolChoice("auto", ("add", "sub")))
    assert allowed["type"] == "allowed_tools"
    assert [tool["name"] for tool in allowed["tools"]] == ["add", "sub"]


def test_a_tool_is_shown_with_its_defaults() -> None:
    shown = _shown_tool({"type": "function", "name": "add", "strict": True})
    assert shown == {
        "type": "function",
        "name": "add",
        "description": None,
        "parameters": None,
        "strict": True,
    }
