"""What an API says of a run: each has one class, made for one request, that takes the events and writes
bytes."""

from abc import ABC, abstractmethod

from server.api.generation.run import ChoiceEvent, Usage
from server.errors import ApiError
from server.http.json_response import encode_json


class Answer(ABC):
    """The answer to one request in one piece: ``collect`` every event, then write the ``body``."""

    @abstractmethod
    def collect(self, event: ChoiceEvent) -> None: ...

    @abstractmethod
    async def written(self, usage: Usage) -> bytes:
        """The body in JSON."""


class StreamedAnswer(Answer):
    """An answer that may be a stream instead: ``chunks`` until its ``end`` or ``failure``. ``usage`` is that
    of the run so far."""

    @abstractmethod
    def body(self, usage: Usage) -> object:
        """The answer in one piece, as JSON values."""

    async def written(self, usage: Usage) -> bytes:
        return encode_json(self.body(usage))

    @abstractmethod
    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes: ...

    @abstractmethod
    def end(self, usage: Usage) -> bytes: ...

    @abstractmethod
    def failure(self, error: ApiError, usage: Usage) -> bytes: ...
