"""Downloads a model folder by its hub id through huggingface_hub (extra ``hub``): JSON, safetensors and
templates only, never code or pickles. What is already in its cache is used without the network. Imports no
torch.
"""

from pathlib import Path

from model.interface.errors import CheckpointError

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def download(hub_id: str) -> Path:
    """The local folder of ``owner/name``. Raises CheckpointError with the remedy when it cannot be had."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise CheckpointError(
            f"{hub_id}: there is no such file or folder. "
            "To download it from the hub, install the extra: pip install 'gemserve[hub]'."
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=ALLOW_PATTERNS))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id}: access to this model is gated. Accept its licence on its page and log in with "
            "`hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id}: there is no such file, folder or model on the hub, or it is private."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{hub_id}: there is no such file or folder, and the hub cannot be reached to download it "
            f"({type(error).__name__}). Check the network, or name a local folder or a .gguf file."
        ) from error
