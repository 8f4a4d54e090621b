"""Tokenizers for the tests of server.text: the small one for logic, the one rebuilt from the default model's
file for the published ids."""

import pytest
import tokenizers

from model.checkpoint.open import open_checkpoint
from server.text.tokenizer import Tokenizer
from tests.server.text.small_tokenizer import build_library_tokenizer, build_tokenizer


@pytest.fixture(scope="session")
def library() -> tokenizers.Tokenizer:
    return build_library_tokenizer()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="session")
def gemma_file() -> str:
    checkpoint = open_checkpoint(None, progress=False)
    try:
        return str(checkpoint.tokenizer_file)
    finally:
        checkpoint.close()


@pytest.fixture(scope="session")
def gemma(gemma_file: str) -> Tokenizer:
    return Tokenizer.from_file(gemma_file, vocab_size=262144, bos_token_id=2, eos_token_ids=(1, 106))
