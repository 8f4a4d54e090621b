"""Encoding runs beside the model and the event loop, and must not stop them: it lets other threads run."""

import threading
import time

from server.text import Tokenizer


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    text = "Hello all a b " * 40_000
    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.perf_counter()
    ids = tokenizer.encode_plain(text)
    seconds = time.perf_counter() - started
    done.set()
    ticker.join()
    assert len(ids) > 100_000
    # Held throughout, the interpreter's lock would make one gap of the whole time; half of it leaves room for a busy machine.
    assert max(gaps) < max(seconds / 2, 0.05)
