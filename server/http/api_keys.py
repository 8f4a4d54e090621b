"""The keys of which a request must bring one: those of --api-key and those in the file of --api-key-file. A
file without a key is an error, for it would open the server to everybody."""

from pathlib import Path

from server.settings.settings import Settings, SettingsError


def api_keys(settings: Settings) -> tuple[str, ...]:
    """All keys; none: every request is served. Raises SettingsError."""
    if settings.api_key_file is None:
        return settings.api_key
    return (*settings.api_key, *_read_keys(settings.api_key_file))


def _read_keys(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {file} is not readable text: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"--api-key-file {file} holds no key; write one into it, or leave the flag out")
    return keys
