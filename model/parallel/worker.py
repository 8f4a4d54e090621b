"""The process of a rank other than rank 0: does what rank 0 tells it, and ends with it. It serves nobody,
logs nothing and takes no signals: what goes wrong is told to rank 0. torch is imported when the process is
already bound to rank 0's life.
"""

import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, NoReturn

from model.interface.errors import ModelError
from model.parallel.messages import Answer, Call, Connect, Load, Logits, Step
from model.parallel.ranks import adopt, report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from model.parallel.group import Group
    from model.parallel.shard_runner import ShardRunner


def main(rank: str, size: str, messages: str, lifeline: str) -> NoReturn:
    ignore_signals()
    connection, line = adopt(messages, lifeline)
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        Worker(int(rank), int(size), connection).serve()
    except BaseException as error:  # whatever ends this rank ends the group, and rank 0 is told why
        report(line, error)
        os._exit(1)
    os._exit(0)  # native threads of the group must not meet the end of the interpreter


def ignore_signals() -> None:
    """They are sent to all processes of a service, and rank 0 decides."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


class Worker:
    """A rank between two messages."""

    def __init__(self, rank: int, size: int, messages: "Connection") -> None:
        self._rank = rank
        self._size = size
        self._messages = messages
        self._group: Group | None = None
        self._runner: ShardRunner | None = None

    def serve(self) -> None:
        """Until rank 0 closes the connection."""
        import torch  # noqa: F401  while rank 0 has nothing to tell yet

        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                self._messages.send(self._answer(self._messages.recv()))

    def _connect(self, message: Connect) -> None:
        import torch

        from model.parallel.group import Group

        device = (
            torch.device(message.device_type, self._rank)
            if message.device_type == "cuda"
            else torch.device("cpu")
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._group = Group(self._rank, self._size, device, message.rendezvous)

    def _answer(self, message: object) -> Answer:
        try:
            match message:
                case Connect():
                    self._connect(message)
                case Load():
                    self._load(message)
                case Call(method, arguments):
                    getattr(self._loaded, method)(*arguments)
                case Step(layout):
                    return Answer(no_memory=self._loaded.take_part(layout))
                case Logits(num_rows):
                    return Answer(no_memory=self._loaded.take_part_in_logits(num_rows))
                case _:
                    raise TypeError(f"unknown message {message!r}")
        except ModelError as fault:
            return Answer(fault=type(fault)(f"rank {self._rank}: {fault}"))
        return Answer(free_memory=0 if self._runner is None else self._runner.free_memory())

    def _load(self, message: Load) -> None:
        from model.parallel.layers import ModelShard
        from model.parallel.shard_runner import ShardRunner

        assert self._group is not None, "Connect comes first"
        self._runner = None  # before another one takes its place
        checkpoint = message.checkpoint
        shard = ModelShard(self._group, checkpoint.config, message.num_valid_tokens)
        arguments = message.arguments | {"device": str(self._group.device)}
        self._runner = ShardRunner.load(checkpoint, progress=False, shard=shard, **arguments)
        self._runner.join(self._group)
        checkpoint.close()

    @property
    def _loaded(self) -> "ShardRunner":
        assert self._runner is not None, "Load comes first"
        return self._runner
