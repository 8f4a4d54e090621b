"""The import directions of docs/architecture.md: in the source, imports inside functions included, and in a running process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCHEDULING = (
    "request",
    "stats",
    "kv.block_pool",
    "kv.kv_manager",
    "scheduler.decode_group",
    "scheduler.scheduled_batch",
    "scheduler.scheduler",
)


def sources(*patterns: str) -> list[Path]:
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    assert files, f"no file matches {patterns}"
    return files


def imported_modules(file: Path) -> Iterator[str]:
    """Absolute names of what a file imports; ``from a import b`` gives both a and a.b, since b may be a module."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(files: list[Path], *forbidden: str) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported_modules(file)
        if any(name == module or name.startswith(module + ".") for module in forbidden)
    ]


def test_model_never_imports_server() -> None:
    assert violations(sources("model/**/*.py"), "server") == []


def test_nothing_served_knows_how_it_is_deployed() -> None:
    assert violations(sources("model/**/*.py", "server/**/*.py"), "deploy", "ray") == []


def test_the_simulation_imports_no_torch() -> None:
    files = [file for file in sources("deploy/scaling/*.py") if file.name != "measure.py"]
    assert violations(files, "torch", "model.execution.runner") == []


def test_scheduling_imports_no_torch() -> None:
    files = [ROOT / "server" / "engine" / f"{name.replace('.', '/')}.py" for name in SCHEDULING]
    assert violations(files, "torch", "model.execution.runner") == []


def test_api_imports_no_torch() -> None:
    assert violations(sources("server/api/**/*.py"), "torch", "model.execution.runner") == []


def test_text_knows_neither_engine_nor_api() -> None:
    assert violations(sources("server/text/**/*.py"), "server.engine", "server.api", "server.app", "torch") == []


def test_grammar_knows_neither_engine_nor_api_nor_torch() -> None:
    assert violations(sources("server/grammar/**/*.py"), "server.engine", "server.api", "server.app", "torch", "fastapi") == []


def test_engine_knows_no_http_and_no_command_line() -> None:
    files = sources("server/engine/**/*.py")
    assert violations(files, "server.api", "server.app", "server.cli", "fastapi", "starlette", "uvicorn") == []


def test_only_loading_and_the_core_touch_the_model_runner() -> None:
    # quality.py is a command of its own that compares two loaded models; it serves nothing.
    allowed = {ROOT / "server/engine/core.py", ROOT / "server/loading/load.py", ROOT / "server/bench/quality.py"}
    assert violations([file for file in sources("server/**/*.py") if file not in allowed], "model.execution.runner") == []


def test_command_line_and_plan_import_no_torch_by_themselves() -> None:
    files = [file for file in sources("server/cli/*.py", "server/bench/*.py", "server/*.py") if file.name != "quality.py"]
    assert violations(files, "torch") == []


@pytest.mark.parametrize(
    "modules",
    [
        ["server.settings.settings", "server.__main__", "server.cli", "server.loading.memory_plan", "server.bench.run"],
        ["model.checkpoint.open", "model.execution.weight_cache", "model.host.torch_import", "server.loading.load"],
        [f"server.engine.{name}" for name in SCHEDULING],
        ["server.text"],
        ["server.grammar"],
        ["server.api"],
    ],
    ids=lambda modules: modules[0],
)
def test_importing_leaves_torch_out(modules: list[str]) -> None:
    program = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    inner = pkgutil.iter_modules(module.__path__, name + ".") if hasattr(module, "__path__") and name != "server.cli" else []
    for found in [name, *(info.name for info in inner)]:
        importlib.import_module(found)
        assert "torch" not in sys.modules, f"importing {found} imports torch"
"""
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
