"""Which folder may import which, stated for every folder of server/ and model/, and that no imports run in a
circle: in the source, imports inside functions and for type checking included, and in a running process."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "server")
# Packages of others that only the folders which name them may import. The rest (pydantic, numpy, ...) is
# free.
GUARDED = frozenset(
    {
        "deploy",
        "fastapi",
        "jinja2",
        "llguidance",
        "ray",
        "starlette",
        "tests",
        "tokenizers",
        "torch",
        "triton",
        "uvicorn",
    }
)

# For every folder, and for every file that lies in server/ or model/ itself: what it may import besides
# itself.
RULES: Mapping[str, str] = {
    "model/precision.py": "model/config model/host model/interface",
    "model/interface": "",
    "model/config": "model/interface",
    "model/host": "model/interface",
    "model/checkpoint": "model/config model/host model/interface model/ops/cpu torch",
    "model/ops": (
        "model/config model/host model/interface model/ops/cpu model/ops/cuda model/precision.py torch"
    ),
    "model/ops/cpu": "model/config model/host model/ops model/precision.py torch",
    "model/ops/cuda": "model/config model/interface model/ops model/ops/cuda/triton torch",
    "model/ops/cuda/triton": "model/ops torch triton",
    "model/network": "model/config model/interface model/ops torch",
    "model/sampling": "model/interface model/network model/ops torch",
    "model/execution": (
        "model/checkpoint model/config model/host model/interface model/network model/ops model/precision.py "
        "model/sampling torch"
    ),
    "model/parallel": (
        "model/checkpoint model/config model/execution model/interface model/network model/ops "
        "model/precision.py torch"
    ),
    "model/bench": (
        "model/checkpoint model/config model/execution model/host model/interface model/network model/ops "
        "model/ops/cpu torch"
    ),
    "server/__main__.py": "model/interface server/cli server/loading server/settings",
    "server/admission.py": "server/errors.py",
    "server/app.py": (
        "fastapi server/api/chat server/api/completions server/api/decisions server/api/embeddings "
        "server/api/messages server/api/meta server/api/responses server/api/tokenize server/engine "
        "server/errors.py server/http server/loading server/observability server/settings server/state.py "
        "server/version.py starlette"
    ),
    "server/build.py": "",
    "server/errors.py": "",
    "server/state.py": (
        "server/admission.py server/engine server/errors.py server/loading server/observability "
        "server/settings server/version.py"
    ),
    "server/version.py": "",
    "server/api": "server/api/generation server/errors.py server/http",
    "server/api/generation": (
        "model/interface server/admission.py server/engine server/errors.py server/grammar server/http "
        "server/loading server/observability server/settings server/state.py server/text "
        "server/text/template server/text/tool_calls starlette"
    ),
    "server/api/choices": "server/api/generation server/errors.py server/http server/observability",
    "server/api/completions": (
        "fastapi server/api server/api/choices server/api/generation server/engine server/errors.py "
        "server/text starlette"
    ),
    "server/api/chat": (
        "fastapi server/api server/api/choices server/api/generation server/errors.py server/text "
        "server/text/tool_calls starlette"
    ),
    "server/api/responses": (
        "fastapi server/api server/api/generation server/errors.py "
        "server/grammar server/http server/state.py server/text server/text/template "
        "server/text/tool_calls starlette"
    ),
    "server/api/messages": (
        "fastapi server/api server/api/chat server/api/generation "
        "server/errors.py server/http server/loading server/state.py server/text/tool_calls starlette"
    ),
    "server/api/decisions": (
        "fastapi model/interface server/api server/api/generation server/api/responses "
        "server/errors.py server/http server/loading server/state.py server/text "
        "server/text/template starlette"
    ),
    "server/api/embeddings": (
        "fastapi model/interface server/api server/api/generation server/errors.py server/http "
        "server/loading server/state.py starlette"
    ),
    "server/api/tokenize": (
        "fastapi server/admission.py server/api server/api/generation server/errors.py server/http "
        "server/loading server/state.py server/text starlette"
    ),
    "server/api/meta": (
        "fastapi server/api server/api/chat server/api/completions server/api/decisions "
        "server/api/embeddings server/api/generation server/api/messages server/api/responses "
        "server/api/tokenize server/errors.py server/http server/settings server/state.py "
        "server/version.py starlette"
    ),
    "server/batch": "model/interface server/app.py server/engine server/errors.py server/settings",
    "server/bench": "model/bench model/interface server/engine server/engine/kv "
    "server/engine/scheduler server/settings",
    "server/cli": (
        "model/checkpoint model/config model/host model/interface model/ops/cpu model/parallel "
        "model/precision.py server/app.py server/batch server/bench server/engine server/http server/loading "
        "server/observability server/settings server/state.py server/version.py uvicorn"
    ),
    "server/engine": "model/interface server/engine/kv server/engine/scheduler",
    "server/engine/kv": "model/interface server/engine",
    "server/engine/scheduler": "model/interface server/engine server/engine/kv",
    "server/grammar": "llguidance model/interface server/text server/text/tool_calls",
    "server/http": "server/errors.py server/observability server/settings server/state.py starlette uvicorn",
    "server/loading": (
        "model/checkpoint model/config model/execution model/host model/interface model/parallel "
        "server/engine server/engine/kv server/engine/scheduler server/grammar server/settings server/text "
        "server/text/template"
    ),
    "server/observability": "model/interface server/build.py server/engine server/errors.py server/settings "
    "server/version.py",
    "server/settings": "model/host model/interface server/build.py",
    "server/text": "model/interface server/text/template tokenizers",
    "server/text/template": "jinja2 server/text/tool_calls",
    "server/text/tool_calls": "",
}
# Files that may import more than the rest of their folder.
EXCEPTIONS: Mapping[str, str] = {
    # serves the whole application, over a model that takes no time
    "server/bench/front_end_server.py": (
        "server/app.py server/grammar server/http server/loading server/text tokenizers uvicorn"
    ),
    # compares two loaded models; serves nothing
    "server/bench/quality.py": "model/checkpoint model/execution server/text torch",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One module's import of another, both with dots. ``target`` is a module of the tree, or a package of
    others."""

    file: str
    module: str
    target: str


class Tree:
    """The modules of a folder's packages, and what they import."""

    def __init__(self, root: Path) -> None:
        self._root = root
        files = sorted(file for package in PACKAGES for file in root.glob(f"{package}/**/*.py"))
        assert files, f"no modules in {root}"
        self._files = {self._name(file): file.relative_to(root).as_posix() for file in files}
        self.imports = [found for file in files for found in self._imports(file)]

    @property
    def rooms(self) -> set[str]:
        """Folders with modules; files right in a package are rooms of their own."""
        return {self.room(module) for module in self._files} - set(PACKAGES)

    def room(self, module: str) -> str:
        file = self._files.get(module)
        if file is None:
            return module.partition(".")[0]
        folder, _, name = file.rpartition("/")
        return file if folder in PACKAGES and name != "__init__.py" else folder

    def _name(self, file: Path) -> str:
        parts = file.relative_to(self._root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imports(self, file: Path) -> Iterator[Import]:
        module = self._name(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                # Either of ``a`` in ``from b import a``: a module of b, or a name in b.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                yield Import(self._files[module], module, self._resolved(name))

    def _resolved(self, name: str) -> str:
        if name.partition(".")[0] not in PACKAGES:
            return name
        while name not in self._files:
            name, _, _ = name.rpartition(".")
            assert name, "an import of a package that is not there"
        return name


def violations(tree: Tree, rules: Mapping[str, str], exceptions: Mapping[str, str]) -> list[str]:
    """Imports that the rules do not allow, and folders that they do not name."""
    found = [f"{room} has no rule" for room in sorted(tree.rooms - set(rules))]
    for item in tree.imports:
        room, target = tree.room(item.module), tree.room(item.target)
        allowed = {room, *rules.get(room, "").split(), *exceptions.get(item.file, "").split()}
        if target not in allowed and (target.partition("/")[0] in PACKAGES or target in GUARDED):
            found.append(f"{item.file} imports {item.target}")
    return found


def circles(imports: Iterable[Import]) -> list[str]:
    """Circles among what lies side by side in a folder: files, and folders with all that is in them. A circle
    of files anywhere is one of these, seen from the folder that holds all of it."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for item in imports:
        ours, theirs = item.module.split("."), item.target.split(".")
        depth = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if depth is not None:
            graphs[".".join(ours[:depth])][ours[depth]].add(theirs[depth])
    found = []
    for folder, graph in sorted(graphs.items()):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{folder or 'packages'}: {' <- '.join(error.args[1])}")
    return found


TREE = Tree(ROOT)


def test_every_import_is_allowed() -> None:
    assert violations(TREE, RULES, EXCEPTIONS) == []


def test_the_rules_name_nothing_that_is_gone() -> None:
    assert set(RULES) - TREE.rooms == set()
    allowed = {word for words in [*RULES.values(), *EXCEPTIONS.values()] for word in words.split()}
    assert allowed - TREE.rooms - GUARDED == set()
    assert [file for file in EXCEPTIONS if not (ROOT / file).exists()] == []


def test_nothing_is_allowed_that_nobody_imports() -> None:
    used = {
        (tree_room, TREE.room(item.target))
        for item in TREE.imports
        for tree_room in (TREE.room(item.module), item.file)
    }
    unused = [(room, word) for room, words in [*RULES.items(), *EXCEPTIONS.items()] for word in words.split()]
    assert [pair for pair in unused if pair not in used] == []


def test_no_imports_run_in_a_circle() -> None:
    assert circles(TREE.imports) == []


def planted(folder: Path, files: Mapping[str, str]) -> Tree:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Tree(folder)


PLANTED_RULES = {"model/a": "model/b", "model/b": "", "server/c": "model/a", "server/main.py": "server/c"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model/b/x.py", "import server.c.z", "model/b/x.py imports server.c.z"),
        ("server/c/z.py", "from model.b import x", "server/c/z.py imports model.b.x"),
        ("model/a/y.py", "def f():\n    from server import main", "model/a/y.py imports server.main"),
        ("server/c/z.py", "import torch.nn", "server/c/z.py imports torch.nn"),
        (
            "server/c/z.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "server/c/z.py imports torch",
        ),
        ("server/d/new.py", "", "server/d has no rule"),
        ("server/other.py", "", "server/other.py has no rule"),
    ],
)
def test_an_import_against_the_rules_is_found(tmp_path: Path, file: str, text: str, message: str) -> None:
    sound = {
        "model/b/x.py": "import numpy",
        "model/a/y.py": "from model.b import x",
        "server/c/z.py": "import model.a.y\nfrom server.c import z2",
        "server/c/z2.py": "",
        "server/main.py": "from server.c.z import name",
    }
    assert violations(planted(tmp_path / "sound", sound), PLANTED_RULES, {}) == []
    wrong = planted(tmp_path / "wrong", {**sound, file: text})
    assert violations(wrong, PLANTED_RULES, {}) == [message]
    assert violations(
        planted(tmp_path / "excepted", {**sound, file: text}), PLANTED_RULES, {file: "torch"}
    ) == ([] if "torch" in text else [message])


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (
            {"model/a/x.py": "import model.a.y", "model/a/y.py": "def f():\n    from model.a import x"},
            "model.a",
        ),
        (
            {
                "model/a/x.py": "import model.b.x",
                "model/b/y.py": "import model.a.y",
                "model/a/y.py": "",
                "model/b/x.py": "",
            },
            "model",
        ),
        ({"model/x.py": "import model.a.x", "model/a/x.py": "import model.x"}, "model"),
        ({"model/x.py": "import server.x", "server/x.py": "import model.y", "model/y.py": ""}, "packages"),
    ],
    ids=["files", "folders", "file-and-folder", "packages"],
)
def test_a_circle_is_found(tmp_path: Path, files: Mapping[str, str], folder: str) -> None:
    (found,) = circles(planted(tmp_path, files).imports)
    assert found.startswith(f"{folder}: ")


def test_every_folder_says_what_it_is_for_in_the_page_on_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = set(page.splitlines())
    for room in sorted(TREE.rooms):
        if not room.endswith(".py"):
            docstring = ast.get_docstring(
                ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
            )
            assert docstring is not None, room
            assert f"| `{room}/` | {docstring.splitlines()[0].replace('``', '`')} |" in rows, room


def test_the_simulation_imports_no_torch() -> None:
    files = [file for file in sorted(ROOT.glob("deploy/scaling/*.py")) if file.name != "measure.py"]
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}." for alias in node.names]
            assert not [name for name in names if f"{name}.".startswith(("torch.", "model.execution."))], file


@pytest.mark.parametrize(
    "modules",
    [
        ["server.settings", "server.__main__", "server.cli", "server.loading", "server.bench.run"],
        [
            "model.interface",
            "model.config",
            "model.host",
            "model.precision",
            "model.checkpoint",
            "model.execution.weight_cache",
        ],
        ["server.engine.request", "server.engine.stats", "server.engine.kv", "server.engine.scheduler"],
        ["server.text"],
        ["server.grammar"],
        ["server.http", "server.observability"],
        ["server.api"],
    ],
    ids=lambda modules: modules[0],
)
def test_importing_leaves_torch_out(modules: Sequence[str]) -> None:
    """Modules, and all that lie in those of them that are folders."""
    program = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    inner = pkgutil.walk_packages(module.__path__, name + ".") if hasattr(module, "__path__") else []
    for found in [name, *(info.name for info in inner if not info.name.endswith("__main__"))]:
        importlib.import_module(found)
        assert "torch" not in sys.modules, f"importing {found} imports torch"
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
