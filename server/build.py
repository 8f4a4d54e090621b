"""Which commit this server was built from, for ``gemserve_build_info``: what an image says of itself, else
what pip noted when it installed from a repository, else the checkout that the source stands in."""

import json
import os
import re
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

COMMIT_VARIABLE = "GEMSERVE_COMMIT"
UNKNOWN = "unknown"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def commit(root: Path = Path(__file__).parent.parent) -> str:
    """Hexadecimal id, or "unknown". ``root``: the folder of the source. Runs no program and raises
    nothing."""
    return _sound(os.environ.get(COMMIT_VARIABLE)) or _of_installation() or _of_checkout(root) or UNKNOWN


def _of_installation() -> str | None:
    """PEP 610: pip keeps where a package came from, if it was not an index."""
    try:
        origin = json.loads(Distribution.from_name("gemserve").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    vcs = origin.get("vcs_info") if isinstance(origin, dict) else None
    return _sound(vcs.get("commit_id")) if isinstance(vcs, dict) else None


def _of_checkout(root: Path) -> str | None:
    git = root / ".git"
    if git.is_file():  # a worktree: the file names its folder
        git = root / _read(git).removeprefix("gitdir:").strip()
    head = _read(git / "HEAD")
    if not head.startswith("ref:"):
        return _sound(head)
    reference = head.removeprefix("ref:").strip()
    common = git / (_read(git / "commondir") or ".")
    for folder in (git, common):
        found = _sound(_read(folder / reference))
        if found is not None:
            return found
    packed = re.search(rf"^(\S+) {re.escape(reference)}$", _read(common / "packed-refs"), re.MULTILINE)
    return None if packed is None else _sound(packed[1])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _sound(text: object) -> str | None:
    return text if isinstance(text, str) and _COMMIT.fullmatch(text) else None
