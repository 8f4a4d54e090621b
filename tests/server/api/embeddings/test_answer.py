"""Embeddings have length 1 and stand in the order of their inputs, as numbers or in base64."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from server.api.embeddings.answer import EmbeddingsAnswer, normalised
from server.api.embeddings.request import EmbeddingRequest
from tests.server.api.events import HEAD, event, usage
from tests.server.api.fakes import server_state


def written(encoding_format: str | None) -> dict[str, Any]:
    body = EmbeddingRequest.model_validate({"input": ["a", "b"], "encoding_format": encoding_format})

    async def write() -> bytes:
        said = EmbeddingsAnswer(server_state(), body, HEAD)
        for index, mean in ((1, [0.0, 2.0]), (0, [3.0, 4.0])):
            said.collect(replace(event(index=index, finish="length"), mean_hidden=np.array(mean)))
        return await said.written(usage(prompt=5))

    found: dict[str, Any] = json.loads(asyncio.run(write()))
    return found


def test_numbers() -> None:
    body = written(None)
    assert [item["index"] for item in body["data"]] == [0, 1]
    assert body["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert body["data"][1]["embedding"] == [0.0, 1.0]
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_base64_is_the_same_in_float32() -> None:
    decoded = np.frombuffer(base64.b64decode(written("base64")["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == written("float")["data"][0]["embedding"]


def test_zeros_stay_zeros() -> None:
    assert normalised(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
