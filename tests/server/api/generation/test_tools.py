"""What may be called: by the choice, the functions given, and whether several calls may be made."""

import pytest

from server.api.generation.tool_schemas import ToolChoice
from server.api.generation.tools import tool_use
from server.errors import ApiError
from server.text.tool_calls.functions import Function


def function(name: str, index: int = 0, **schema: object) -> Function:
    return Function(name, None, dict(schema), f"tools[{index}].function.parameters")


ADD, SUB = function("add"), function("sub", 1)


def test_without_functions_only_none_may_be_chosen() -> None:
    assert tool_use([], None, None) is None
    assert tool_use([], ToolChoice("none"), None) is None
    with pytest.raises(ApiError, match="only when 'tools' are given") as refused:
        tool_use([], ToolChoice("auto"), None)
    assert refused.value.param == "tool_choice"


def test_auto_may_call_any_and_none_calls_nothing() -> None:
    use = tool_use([ADD, SUB], None, None)
    assert use is not None
    assert (use.functions, use.must_call, use.several) == ((ADD, SUB), False, True)
    assert tool_use([ADD], ToolChoice("none"), None) is None


def test_a_named_function_must_be_called_alone_and_once() -> None:
    use = tool_use([ADD, SUB], ToolChoice("required", ("sub",), is_named=True), None)
    assert use is not None
    assert (use.functions, use.must_call, use.several) == ((SUB,), True, False)
    assert use.shown == (ADD, SUB), "the model is told of all"


def test_parallel_calls_can_be_turned_off() -> None:
    use = tool_use([ADD], None, False)
    assert use is not None
    assert not use.several
    assert use.call_format.is_single


@pytest.mark.parametrize(
    ("functions", "choice", "param"),
    [
        ([ADD, function("add", 1)], None, "tools[1].function.name"),
        ([ADD], ToolChoice("required", ("mul",), is_named=True), "tool_choice"),
        ([function("add", 0, type="array")], None, "tools[0].function.parameters.type"),
    ],
)
def test_what_does_not_fit_together_is_named(
    functions: list[Function], choice: ToolChoice | None, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        tool_use(functions, choice, None)
    assert (refused.value.param, refused.value.code) == (param, "invalid_value")
