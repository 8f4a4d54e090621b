"""What the servers answered, as a file, and how two such recordings differ."""

import difflib
import hashlib
import itertools
import json
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.corpus.areas import AREAS
from tests.corpus.exchange import Exchange
from tests.corpus.normal import NormalAnswer, normal_answers
from tests.corpus.servers import ServerSpec, server_process
from tests.corpus.wire import Ports, exchange_answers, running_stream


@dataclass(frozen=True, slots=True)
class Entry:
    """One exchange as recorded. ``request`` is the digest of its bytes: answers to other requests are not
    compared."""

    request: str
    answers: tuple[NormalAnswer, ...]

    def lines(self) -> list[str]:
        """Every character of the answers, in lines that a difference can be seen in."""
        found = [f"request {self.request}"]
        for answer in self.answers:
            found += [answer.status_line, *(f"{name}: {value}" for name, value in answer.headers), ""]
            found += re.sub(r'(?<=[,{\[\n])(?=["{\[\w:-])', "\n", answer.body).split("\n")
        return found


# By "server/area/name of the exchange", in the order in which they were sent.
Recording = dict[str, Entry]


def make_recording(specs: Sequence[ServerSpec], root: Path) -> Recording:
    """Ask the servers of the tree ``root``, one after the other. Raises ServerError."""
    recording: Recording = {}
    for spec in specs:
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="gemserve-corpus-") as folder,
            server_process(spec, root, Path(folder)) as ports,
        ):
            found = dict(_ask(spec, ports))
        recording |= found
        print(f"corpus: {spec.name}: {len(found)} exchanges in {time.monotonic() - began:.0f} s", flush=True)
    return recording


def _ask(spec: ServerSpec, ports: Ports) -> Iterator[tuple[str, Entry]]:
    for area, exchanges in AREAS[spec.name].items():
        for stream, neighbours in itertools.groupby(exchanges, key=lambda exchange: exchange.beside):
            if stream is None:
                found = _entries(list(neighbours), ports)
            else:
                with running_stream(stream, ports):
                    found = _entries(list(neighbours), ports)
            for exchange, entry in found:
                yield f"{spec.name}/{area}/{exchange.name}", entry


def _entries(exchanges: Sequence[Exchange], ports: Ports) -> list[tuple[Exchange, Entry]]:
    """Of the exchanges in their order; those of one group are sent at the same time."""
    entries: list[tuple[Exchange, Entry]] = []
    for group, members in itertools.groupby(exchanges, key=lambda exchange: exchange.group):
        together = list(members)
        with ThreadPoolExecutor(1 if group is None else len(together)) as threads:
            answers = list(threads.map(lambda exchange: exchange_answers(exchange, ports), together))
        for exchange, found in zip(together, answers, strict=True):
            normal = normal_answers(found, is_interleaved=exchange.is_interleaved)
            entries.append((exchange, Entry(hashlib.sha256(exchange.request).hexdigest(), tuple(normal))))
    return entries


def differences(recorded: Recording, found: Recording) -> Iterator[str]:
    """One text for each exchange that differs, or that only one of the recordings has."""
    for name in {**recorded, **found}:
        before, after = recorded.get(name), found.get(name)
        if before is None or after is None:
            yield f"{name}: only {'in the recording' if after is None else 'sent now'}"
        elif before.request != after.request:
            yield f"{name}: another request was recorded under this name"
        elif before != after:
            lines = difflib.unified_diff(before.lines(), after.lines(), "recorded", "now", lineterm="", n=2)
            yield "\n".join([f"{name}:", *lines])


def counts(recording: Recording) -> dict[str, int]:
    """Exchanges of each area, those of all servers together."""
    areas = [name.split("/")[1] for name in recording]
    return {area: areas.count(area) for area in dict.fromkeys(areas)}


# -- files ---------------------------------------------------------------------------------------------------


def write_recording(file: Path, recording: Recording, root: Path) -> None:
    entries = {
        name: {
            "request": entry.request,
            "answers": [
                {"status_line": answer.status_line, "headers": answer.headers, "body": answer.body}
                for answer in entry.answers
            ],
        }
        for name, entry in recording.items()
    }
    content = {"commit": _commit(root), "machine": platform.platform(), "exchanges": entries}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_recording(file: Path) -> tuple[str, Recording]:
    """(the commit that it was made from, the recording)"""
    content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content["commit"], {
        name: Entry(
            entry["request"],
            tuple(
                NormalAnswer(
                    answer["status_line"],
                    tuple((name, value) for name, value in answer["headers"]),
                    answer["body"],
                )
                for answer in entry["answers"]
            ),
        )
        for name, entry in content["exchanges"].items()
    }


def _commit(root: Path) -> str:
    """The commit of a tree, and whether it has changes."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
