"""A rank without a model, which starts at once: it does what a message that is a text says."""

import os
import signal
import time

from model.interface.errors import ConfigError
from model.parallel.messages import Answer
from model.parallel.ranks import adopt, report
from model.parallel.worker import ignore_signals


def main(rank: str, size: str, messages: str, lifeline: str) -> None:
    ignore_signals()
    connection, line = adopt(messages, lifeline)
    while True:
        match connection.recv():
            case "answer":
                connection.send(Answer(free_memory=int(rank) * 100 + int(size)))
            case "refuse":
                connection.send(Answer(fault=ConfigError(f"rank {rank}: --flag is wrong")))
            case "fail":
                report(line, ValueError("the tensor is bent"))
                os._exit(1)
            case "be interrupted":
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                connection.send(Answer())
            case "be busy":
                time.sleep(600)
