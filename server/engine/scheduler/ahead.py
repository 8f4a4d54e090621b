"""The step after one that is under way, of requests that all decode: it runs the tokens which that one draws,
before anybody knows them. What is known to end there is left out; what ends with a token that nobody foresaw
is found when the results are read, and what the step ahead draws for it is then dropped. Imports no torch."""

import numpy as np

from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import Request, RequestStatus
from server.engine.scheduler.decode_group import DecodeGroup
from server.engine.scheduler.scheduled_batch import ScheduledBatch


def batch_ahead(
    batch: ScheduledBatch, group: DecodeGroup | None, running: list[Request], kv: KVCacheManager
) -> ScheduledBatch | None:
    """The step after ``batch``, which has nothing but decodes, with blocks for it; None where there is
    nothing to run, or not all that runs would be in it, or the pool has no room. ``group``: the requests that
    got their last token together, if they did."""
    if group is not None and group.requests == batch.decodes and group.can_run_ahead(running):
        ahead = ScheduledBatch(group.requests, num_tokens_before=group.num_tokens)
        beginning = group.next_to_begin_block
    else:
        of_batch = [
            (i, request) for i, request in enumerate(batch.decodes) if request.status is RequestStatus.RUNNING
        ]
        if len(of_batch) < len(running):
            return None  # one had no room in the step
        going_on = [
            (i, request) for i, request in of_batch if len(request.token_ids) + 1 < request.max_num_tokens
        ]
        if not going_on:
            return None
        ahead = ScheduledBatch([request for _, request in going_on])
        ahead.num_tokens_before = np.array(
            [len(request.token_ids) for request in ahead.decodes], dtype=np.int64
        )
        if len(going_on) < len(batch.decodes):
            ahead.of_batch_before = np.array([i for i, _ in going_on], dtype=np.int64)
        beginning = ahead.decodes
    wanting = [request for request in beginning if len(request.token_ids) >= request.num_slots]
    return ahead if kv.allocate_one_each(wanting) else None
