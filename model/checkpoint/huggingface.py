"""A checkpoint in a Hugging Face folder: config.json, tokenizer.json, and model.safetensors or shards with an
index. Everything is checked from JSON and safetensors headers before a weight is read; nothing in the folder
is executed.

Which files say what:
- the index, where there is one, decides per tensor which shard is read; every tensor of a listed shard must
  stand in it.
- the stop set is the union of eos_token_id in config.json (outer and text level) and generation_config.json,
  and
  ``<end_of_turn>`` if the tokenizer has it: the same set that a GGUF of the same model gets.
- the chat template is chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json.
- a tensor that is not part of the text model is an error, except those of the vision tower and projector,
  which are skipped.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from model.checkpoint.base import END_OF_TURN, check_tensors, require_complete, sampled_fingerprint
from model.checkpoint.safetensors_header import (
    DTYPE_BYTES,
    StoredTensor,
    read_json_object,
    read_safetensors_header,
)
from model.config.formats import token_id_list
from model.config.gemma3_config import Gemma3Config
from model.config.tensors import EMBEDDING, HEAD, checkpoint_tensors
from model.interface.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 26
COMPARE_ROWS = 1 << 14

_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
_VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ADDED_TOKEN = re.compile(rb'"id"\s*:\s*(\d{1,9})\s*,\s*"content"\s*:\s*"<end_of_turn>"')


def canonical_name(stored_name: str) -> str:
    """The name without the prefixes of multimodal checkpoints; an unknown name is returned as it is."""
    if stored_name in (HEAD, f"language_model.{HEAD}"):
        return HEAD
    for prefix in _TEXT_PREFIXES:
        if stored_name.startswith(prefix):
            return "model." + stored_name.removeprefix(prefix)
    return stored_name


class HuggingFaceCheckpoint:
    """Implements ``Checkpoint`` on a folder."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self._folder = folder
        self._headers: dict[Path, bytes] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._closed = False
        self.tokens: list[str] | None = None  # stand in tokenizer.json alone
        self.name = name
        config_bytes = self._read("config.json")
        if config_bytes is None:
            raise CheckpointError(f"{folder / 'config.json'}: is missing; a model folder needs it.")
        self._config_bytes = config_bytes
        generation = self._json("generation_config.json") or {}
        self.default_sampling: dict[str, Any] = {
            key: generation[key] for key in _SAMPLING_KEYS if type(generation.get(key)) in (int, float)
        }
        config = self._parse_config(read_json_object(config_bytes, str(folder / "config.json")), generation)
        self._collect_tensors()
        check_tensors(
            config,
            {key: (str(stored.file), stored.name, stored.shape) for key, stored in self._tensors.items()},
        )
        require_complete(config, self._tensors, str(folder))
        self._check_dtypes()
        self.config = replace(config, tie_word_embeddings=self._is_tied(config))
        self.chat_template = self._chat_template()

    def _parse_config(self, raw: dict[str, Any], generation: dict[str, Any]) -> Gemma3Config:
        try:
            config = Gemma3Config.from_hf(raw)
        except ConfigError as error:
            raise ConfigError(f"{self._folder / 'config.json'}: {error}") from error
        try:
            config = config.with_eos_token_ids(token_id_list(generation, "eos_token_id"))
        except ConfigError as error:
            raise ConfigError(f"{self._folder / 'generation_config.json'}: {error}") from error
        return config.with_eos_token_ids(
            token_id for token_id in self._end_of_turn() if token_id < config.vocab_size
        )

    @property
    def tokenizer_file(self) -> Path:
        path = self._folder / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; save the model with its fast tokenizer.")
        return path

    def _end_of_turn(self) -> list[int]:
        """The id of ``<end_of_turn>``, from the tokenizer's text: parsing its 33 MB takes seconds, finding
        one entry none."""
        content = self._read(TOKENIZER_FILE)
        if content is None:
            return []
        if not (content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"):
            raise CheckpointError(
                f"{self.tokenizer_file}: is not a whole JSON object; the file is damaged, fetch it again."
            )
        if END_OF_TURN.encode() not in content:
            return []
        if (match := _ADDED_TOKEN.search(content)) is not None:
            return [int(match.group(1))]
        parsed = read_json_object(content, str(self.tokenizer_file))
        added = parsed.get("added_tokens")
        entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        return [
            entry["id"]
            for entry in entries
            if entry.get("content") == END_OF_TURN and isinstance(entry.get("id"), int)
        ]

    def _collect_tensors(self) -> None:
        skipped = 0
        for stored in self._stored_tensors():
            if stored.name.startswith(_VISION_PREFIXES):
                skipped += 1
                continue
            name = canonical_name(stored.name)
            if name in self._tensors:
                raise CheckpointError(
                    f"{stored.file}: tensors {self._tensors[name].name!r} and {stored.name!r} are "
                    "the same weight."
                )
            self._tensors[name] = stored
        if skipped:
            logger.info(
                "%s: skipping %d tensors of the vision tower and projector; only text is served",
                self._folder,
                skipped,
            )

    def _stored_tensors(self) -> Iterator[StoredTensor]:
        index = self._json(INDEX_FILE)
        if index is None:
            if not (self._folder / SINGLE_FILE).is_file():
                raise self._no_weights()
            yield from self._header(self._folder / SINGLE_FILE).values()
            return
        where = self._folder / INDEX_FILE
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise CheckpointError(f"{where}: weight_map must map tensor names to file names.")
        shards = {shard: self._header(self._shard_path(shard)) for shard in sorted(set(weight_map.values()))}
        for shard, tensors in shards.items():
            for name in tensors:
                if name not in weight_map:
                    raise CheckpointError(
                        f"{self._folder / shard}: tensor {name!r:.200} is not listed in {INDEX_FILE}."
                    )
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise CheckpointError(
                    f"{self._folder / shard}: tensor {name!r:.200} is missing, but {INDEX_FILE} "
                    "says it is here."
                )
            yield shards[shard][name]

    def _shard_path(self, shard: str) -> Path:
        """Only a plain relative path inside the folder, with the suffix of the one format that is read."""
        pure = PurePosixPath(shard)
        if (
            pure.is_absolute()
            or ".." in pure.parts
            or "\\" in shard
            or "\0" in shard
            or pure.suffix != ".safetensors"
        ):
            raise CheckpointError(
                f"{self._folder / INDEX_FILE}: {shard!r:.200} is not the name of a .safetensors file "
                "inside the folder."
            )
        path = self._folder / pure
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing, but {INDEX_FILE} lists it; fetch the missing shard.")
        return path

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        header, tensors = read_safetensors_header(file)
        self._headers[file] = header
        return tensors

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(pattern)
        )
        if pickles:
            return CheckpointError(
                f"{self._folder / pickles[0]}: pickled weights can execute code and are not read; "
                "convert them to safetensors."
            )
        return CheckpointError(f"{self._folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}.")

    def _check_dtypes(self) -> None:
        for stored in self._tensors.values():
            if stored.dtype not in DTYPE_BYTES:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored.name!r} has type {stored.dtype}; "
                    f"supported are {', '.join(DTYPE_BYTES)}."
                )

    def _is_tied(self, config: Gemma3Config) -> bool:
        """Tied if there is no separate head, or if it equals the embedding matrix."""
        if HEAD not in self._tensors:
            return True  # completeness has been checked: the configuration asks for no head
        if self._heads_equal():
            return True
        if config.tie_word_embeddings:
            raise CheckpointError(
                f"{self._tensors[HEAD].file}: tensor {self._tensors[HEAD].name!r} differs from the "
                "embeddings although tie_word_embeddings is true; set it to false in config.json, "
                "or remove the tensor."
            )
        return False

    def _heads_equal(self) -> bool:
        head, embedding = self._tensors[HEAD], self._tensors[EMBEDDING]
        if head.dtype != embedding.dtype:
            return False
        import torch

        with ExitStack() as stack:
            left, right = (
                self._open(stack, stored.file).get_slice(stored.name) for stored in (head, embedding)
            )
            return all(
                torch.equal(left[start : start + COMPARE_ROWS], right[start : start + COMPARE_ROWS])
                for start in range(0, head.shape[0], COMPARE_ROWS)
            )

    @cached_property
    def fingerprint(self) -> str:
        parts: list[tuple[bytes, Any]] = [(self._config_bytes, b"")]
        parts += [(header, _FileSamples(file)) for file, header in sorted(self._headers.items())]
        return sampled_fingerprint(parts)

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self._headers)

    @property
    def stored_types(self) -> dict[str, str]:
        return {name: stored.dtype for name, stored in self._tensors.items()}

    @cached_property
    def weight_format(self) -> str:
        sizes: dict[str, int] = {}
        for stored in self._tensors.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.num_bytes
        return _DTYPE_NAMES[max(sizes, key=lambda dtype: sizes[dtype])]

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        if self._closed:
            raise CheckpointError(f"{self._folder}: the checkpoint has been closed.")
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for spec in checkpoint_tensors(self.config):
                stored = self._tensors[spec.name]
                if stored.file not in opened:
                    opened[stored.file] = self._open(stack, stored.file)
                try:
                    tensor = opened[stored.file].get_tensor(stored.name)
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{stored.file}: tensor {stored.name!r} cannot be read: {error}."
                    ) from error
                yield spec.name, tensor

    def close(self) -> None:
        self._closed = True  # files are open only inside tensors()

    def _open(self, stack: ExitStack, file: Path) -> Any:
        try:
            return stack.enter_context(safe_open(str(file), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}.") from error

    def _chat_template(self) -> str | None:
        content = self._read("chat_template.jinja")
        if content is not None:
            try:
                return content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{self._folder / 'chat_template.jinja'}: is not valid UTF-8."
                ) from error
        for file in ("chat_template.json", "tokenizer_config.json"):
            template = (self._json(file) or {}).get("chat_template")
            if isinstance(template, str):
                return template
            if isinstance(template, list):  # several named ones
                named = {
                    entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
                }
                if isinstance(named.get("default"), str):
                    return str(named["default"])
        return None

    def _json(self, name: str) -> dict[str, Any] | None:
        content = self._read(name)
        return None if content is None else read_json_object(content, str(self._folder / name))

    def _read(self, name: str) -> bytes | None:
        """The content of a small file of the folder; None if there is none."""
        path = self._folder / name
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{path}: is larger than {MAX_JSON_BYTES >> 20} MiB, which is not plausible."
                )
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error


class _FileSamples:
    """Lets the fingerprint slice a file without mapping it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        return self._file.stat().st_size

    def __getitem__(self, part: slice) -> bytes:
        with self._file.open("rb") as stream:
            stream.seek(part.start)
            return stream.read(part.stop - part.start)
