"""Keys of the flag and of the file; a file without one opens nothing."""

from pathlib import Path

import pytest

from server.http.api_keys import api_keys
from server.settings.settings import Settings, SettingsError


def test_keys_of_the_file_come_beside_those_of_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n two \n\nthree\n", encoding="utf-8")
    assert api_keys(Settings(api_key=("one",), api_key_file=file)) == ("one", "two", "three")
    assert api_keys(Settings()) == ()


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="--api-key-file"):
        api_keys(Settings(api_key_file=file))
    with pytest.raises(SettingsError, match="--api-key-file"):
        api_keys(Settings(api_key_file=tmp_path / "missing"))
