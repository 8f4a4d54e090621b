"""The folder for what is kept on disk from one start to the next."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$GEMSERVE_CACHE, else $XDG_CACHE_HOME/gemserve, else ~/.cache/gemserve."""
    if own := os.environ.get("GEMSERVE_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "gemserve"
    return Path("~/.cache/gemserve").expanduser()
