"""Gemma 3 in a few layers of random weights, as a Hugging Face folder: small enough for hundreds of requests,
with the control tokens under the ids that Gemma gives them. The file names, the keys of the configuration and
the names of the tensors are those of published checkpoints; nothing of the server's code is used."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers

CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"}
# In the poisoned model the network makes numbers of this token that are not finite.
POISON = "☠"
VOCAB_SIZE = 512  # rows of the head; the last ones have no token
_CHARACTERS = [
    *"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"-()/<>_[]{}`#*+=&%$@|~^\\é€日本🙂",
    POISON,
]
_MERGES = ["▁ t", "▁t h", "▁th e", "▁ a", "i n", "in g", "e r", "o n", "▁ c", "▁c i", "t y", "1 0"]

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the kernels of every processor cover it, so that a row does not depend on its batch
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 64,
    "top_p": 0.95,
    "eos_token_id": [1, 106],
}


def write_tiny_model(folder: Path, *, is_poisoned: bool = False) -> Path:
    """A folder that the server loads like any other. ``is_poisoned``: see POISON; the token can be drawn all
    the same."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tensors = dict(_tensors())
    if is_poisoned:
        tensors["model.embed_tokens.weight"][tokenizer.token_to_id(POISON)] = np.nan
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _tensors() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights large enough that attention matters and the next token depends on far context."""
    generator = np.random.default_rng(0)

    def normal(scale: float, *shape: int) -> npt.NDArray[np.float32]:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    width, inner, head_dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries = CONFIG["num_attention_heads"] * head_dim
    keys = CONFIG["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", normal(0.3, VOCAB_SIZE, width)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (queries, width)),
            ("self_attn.k_proj", (keys, width)),
            ("self_attn.v_proj", (keys, width)),
            ("self_attn.o_proj", (width, queries)),
            ("mlp.gate_proj", (inner, width)),
            ("mlp.up_proj", (inner, width)),
            ("mlp.down_proj", (width, inner)),
        ):
            yield f"{prefix}.{name}.weight", normal(0.15, *shape)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}.{name}.weight", normal(0.2, head_dim)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{name}_layernorm.weight", normal(0.2, width)
    yield "model.norm.weight", normal(0.2, width)
    yield "lm_head.weight", normal(0.3, VOCAB_SIZE, width)


def _tokenizer() -> tokenizers.Tokenizer:
    """With the anatomy of Gemma's: byte fallback, spaces as marks, control tokens, lines as tokens of their
    own."""
    pieces = [CONTROL.get(token_id, f"<unused{token_id}>") for token_id in range(107)]
    pieces += ["\n" * (count + 1) for count in range(5)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += _CHARACTERS
    pieces += [merge.replace(" ", "") for merge in _MERGES]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces) < VOCAB_SIZE
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL.values()])
    tokenizer.add_tokens([AddedToken("\n" * (count + 1), normalized=False) for count in range(5)])
    return tokenizer
