"""Which function is at fault when calls can't be compiled, and how long that is looked for."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.api.generation import tools
from server.api.generation.tool_schemas import ToolChoice
from server.errors import ApiError
from server.grammar.source import GrammarError, GrammarSource
from server.loading.load import LoadedEngine
from server.observability.metrics import Metrics
from server.settings.settings import Settings
from server.text.tool_calls.functions import Function


def test_a_fault_is_not_looked_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of functions, each of them within its limit, would be compiled one by one."""
    monkeypatch.setattr(tools, "FAULT_SECONDS", 0.1)
    tried = []

    class Compiler:
        async def compile(self, source: GrammarSource) -> Any:
            if source.param == "tools":
                raise GrammarError("all together are too much")
            tried.append(source.param)
            await asyncio.sleep(0.01 if len(tried) < 3 else 3600)

    functions = [Function(f"f{index}", None, {}, f"tools[{index}].parameters") for index in range(9)]
    use = tools.tool_use(functions, ToolChoice("required"), None)
    loaded = cast(LoadedEngine, SimpleNamespace(grammars=Compiler()))

    async def scenario() -> None:
        async with asyncio.timeout(60):
            await tools.compile_constraint(loaded, None, use, Metrics(Settings()))

    with pytest.raises(ApiError, match="all together are too much") as refused:
        asyncio.run(scenario())
    assert refused.value.param == "tools"
