"""The mean of the final hidden states of each input, over all of its tokens, scaled to length 1."""

import base64
from typing import TYPE_CHECKING, Literal

import numpy as np
from typing_extensions import TypedDict

from server.api.embeddings.request import EmbeddingRequest
from server.api.generation.answer import Answer
from server.api.generation.prompts import in_thread
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead
from server.http.json_response import encode_json
from server.state import ServerState

if TYPE_CHECKING:
    import numpy.typing as npt


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(TypedDict):
    object: Literal["list"]
    model: str
    usage: EmbeddingsUsage
    data: list[Embedding]


def normalised(mean: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float32]":
    """[h], of length 1; zeros stay zeros."""
    length = float(np.linalg.norm(mean))
    return (mean / length if length else mean).astype("<f4")


def _item(index: int, embedding: "npt.NDArray[np.float32]", as_base64: bool) -> bytes:
    """One at a time: as Python numbers all of them would take many times the memory."""
    value = base64.b64encode(embedding.tobytes()).decode() if as_base64 else embedding.tolist()
    item: Embedding = {"object": "embedding", "index": index, "embedding": value}
    return encode_json(item)


class EmbeddingsAnswer(Answer):
    def __init__(self, state: ServerState, body: EmbeddingRequest, head: ResponseHead) -> None:
        self._state = state
        self._as_base64 = body.encoding_format == "base64"
        self._head = head
        self._embeddings: dict[int, npt.NDArray[np.float32]] = {}

    def collect(self, event: ChoiceEvent) -> None:
        assert event.mean_hidden is not None
        self._embeddings[event.index] = normalised(event.mean_hidden)

    async def written(self, usage: Usage) -> bytes:
        body: EmbeddingsResponse = {
            "object": "list",
            "model": self._head.model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
            "data": [],
        }

        def write() -> bytes:
            embeddings = self._embeddings
            items = (_item(index, embeddings[index], self._as_base64) for index in range(len(embeddings)))
            return encode_json(body).removesuffix(b"]}") + b",".join(items) + b"]}"

        return await in_thread(self._state, write)
