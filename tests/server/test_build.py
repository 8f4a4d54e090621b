"""Which commit build_info names: the image's, pip's, or the checkout's."""

from pathlib import Path

import pytest

from server import build

ID, OTHER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(build, "_of_installation", lambda: None)


def git_folder(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_a_checkout_is_read_in_each_of_its_forms(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    git_folder(loose / ".git", HEAD="ref: refs/heads/main", refs__heads__main=ID)
    assert build.commit(loose) == ID
    detached = tmp_path / "detached"
    git_folder(detached / ".git", HEAD=OTHER)
    assert build.commit(detached) == OTHER
    packed = tmp_path / "packed"
    (git_folder(packed / ".git", HEAD="ref: refs/heads/main") / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{OTHER} refs/heads/main-2\n{ID} refs/heads/main\n"
    )
    assert build.commit(packed) == ID
    worktree = tmp_path / "worktree"
    git_folder(
        loose / ".git",
        worktrees__w__HEAD="ref: refs/heads/w",
        worktrees__w__commondir="../..",
        refs__heads__w=OTHER,
    )
    git_folder(worktree, **{".git": f"gitdir: {loose / '.git' / 'worktrees' / 'w'}"})
    assert build.commit(worktree) == OTHER


def test_what_is_no_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.commit(tmp_path) == "unknown"
    git_folder(tmp_path / ".git", HEAD="ref: refs/heads/main", refs__heads__main="not an id")
    assert build.commit(tmp_path) == "unknown"
    monkeypatch.setenv(build.COMMIT_VARIABLE, 'x" y')
    assert build.commit(tmp_path) == "unknown"


def test_an_image_says_it_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git_folder(tmp_path / ".git", HEAD=OTHER)
    monkeypatch.setenv(build.COMMIT_VARIABLE, "abc1234")
    assert build.commit(tmp_path) == "abc1234"
