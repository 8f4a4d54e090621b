"""Draws the next token of each row of logits, batched, as each request's SamplingParams ask.

Order: penalties (repetition on prompt and generated tokens; presence and frequency on generated tokens only),
bias, masks (a grammar's last, and with it no min_tokens: its end tokens are the grammar's business);
temperature; top-k; top-p of what top-k left; min-p. Log-probabilities are those of the raw logits, before all
of it. A draw is the inverse CDF at one uniform number that depends on (seed, choice, position) alone, so
neither the batch nor a preemption changes it. Ties go to the lowest id. Nothing ever sorts the vocabulary but
a top-k that is a large part of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model.interface.grammar_state import GrammarFault, GrammarState
from model.interface.random_streams import uniforms
from model.interface.running_batch import IntArray, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, TokenLogprobs
from model.network.forward_batch import to_device
from model.ops.interface import Ops
from model.ops.reference import inverse_cdf

NOTHING_LEFT = (
    "No token is left to draw: allowed_token_ids, logit_bias, stop_token_ids, min_tokens and the grammar "
    "exclude every token."
)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A row of the running batch as the sampler reads it, for requests that need more than a plain draw."""

    batch: RunningBatch
    row: int
    position: int  # tokens generated so far

    @property
    def sampling(self) -> SamplingParams:
        return self.batch.sampling[self.row]

    @property
    def grammar(self) -> GrammarState | None:
        return self.batch.grammars[self.row]

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids[self.row]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.batch.num_prompt_tokens[self.row] :]


class Sampler:
    """Samples tokens from float32 logits [r, V], where V is the number of valid tokens. ``sample`` may
    overwrite the logits."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        # may wait for results; on other devices the host has to run ahead of the device
        self.may_wait = ops.device.type == "cpu"

    def draw(
        self, logits: torch.Tensor, batch: RunningBatch, rows: IntArray, positions: IntArray
    ) -> torch.Tensor:
        """Draw a token for each of these rows of the batch from finite logits float32 [r, V], as they are ->
        int64 [r]. ``positions`` [r]: number of tokens that each sequence has generated. Does not wait for the
        device."""
        if np.count_nonzero(batch.is_greedy[rows]) == len(rows):
            return self.ops.argmax(logits)
        groups = sampling_metadata(batch, rows, positions, logits.shape[1], logits.device)
        if len(groups) == 1:
            return self._draw(logits, groups[0])
        drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in groups:
            members = to_device(group.members, logits.device)
            drawn[members] = self._draw(logits[members], group)
        return drawn

    def draw_plain(
        self, logits: torch.Tensor, batch: RunningBatch, rows: IntArray, positions: IntArray
    ) -> torch.Tensor:
        """Draw like ``draw`` from logits that need not be finite, and may overwrite them -> int64 [r], -1
        where a row is not finite."""
        finite = self.ops.all_finite(logits)
        if self.may_wait and bool(finite.all()):
            return self.draw(logits, batch, rows, positions)
        odd = ~finite
        logits.masked_fill_(odd.unsqueeze(1), 0.0)  # so that the drawing stays well-defined
        return self.draw(logits, batch, rows, positions).masked_fill(odd, -1)

    def sample(
        self, logits: torch.Tensor, batch: RunningBatch, rows: IntArray, positions: IntArray
    ) -> list[ChunkResult]:
        """Sample one token per row of logits with all settings of its request. A row that cannot be sampled
        yields an error and harms no other row."""
        chunks = [
            _Sampled(batch, row, position)
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
        ]
        results = [ChunkResult() for _ in chunks]
        finite = self.ops.all_finite(logits).tolist()
        drawing = []
        for index, (result, is_finite) in enumerate(zip(results, finite, strict=True)):
            if is_finite:
                drawing.append(index)
            else:
                result.error = NOT_FINITE
        masks = _grammar_masks(chunks, drawing, results)
        drawing = [
            i for i in drawing if results[i].error is None and (chunks[i].grammar is None or i in masks)
        ]
        edited = self._edit(logits, chunks, drawing, masks, results)
        drawing = [i for i in drawing if results[i].error is None]
        if drawing:
            whole = len(drawing) == len(edited)
            drawn = self.draw(edited if whole else edited[drawing], batch, rows[drawing], positions[drawing])
            for index, token_id in zip(drawing, drawn.tolist(), strict=True):
                results[index].token_ids = [token_id]
        asking = [index for index in drawing if chunks[index].sampling.logprobs is not None]
        if asking:
            entries = self.logprobs(
                logits[asking],
                [results[index].token_ids[0] for index in asking],
                [chunks[index].sampling.logprobs or 0 for index in asking],
                labels=[chunks[index].sampling.logprob_token_ids for index in asking],
            )
            for index, entry in zip(asking, entries, strict=True):
                results[index].logprobs.append(entry)
        return results

    def logprobs(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int],
        counts: Sequence[int],
        *,
        labels: Sequence[Sequence[int] | None] | None = None,
        ranks: bool = False,
    ) -> list[TokenLogprobs]:
        """Compute the raw log-probabilities (natural logarithm) of one token and of the ``counts[i]``
        likeliest, for each row of finite logits [r, V].

        ``labels[i]``, where not None, are tokens to report instead of the likeliest. ``ranks`` adds the
        token's rank. A token has bit for bit the same value on its own, among the likeliest and among the
        labels.
        """
        ones = torch.ones(len(token_ids), device=logits.device)
        values, top_ids, log_total = self.ops.top_candidates(
            logits, min(max(1, *counts), logits.shape[1]), ones
        )
        chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
        chosen_logprobs = ((chosen - values[:, :1]) - log_total[:, None])[:, 0].tolist()
        top_logprobs = ((values - values[:, :1]) - log_total[:, None]).tolist()
        top_ids_host = top_ids.tolist()
        entries = [
            TokenLogprobs(token_id, logprob, list(zip(ids[:count], likeliest[:count], strict=True)))
            for token_id, logprob, ids, likeliest, count in zip(
                token_ids, chosen_logprobs, top_ids_host, top_logprobs, counts, strict=True
            )
        ]
        for row, wanted in enumerate(labels or ()):
            if wanted is not None:
                of_labels = logits[row, torch.tensor(wanted, device=logits.device)]
                label_logprobs = ((of_labels - values[row, 0]) - log_total[row]).tolist()
                entries[row].top = list(zip(wanted, label_logprobs, strict=True))
        if ranks:
            for entry, num_likelier in zip(entries, (logits > chosen).sum(dim=-1).tolist(), strict=True):
                entry.rank = num_likelier + 1
        return entries

    # -- before the draw -------------------------------------------------------------------------------------

    def _edit(
        self,
        logits: torch.Tensor,
        chunks: Sequence[_Sampled],
        rows: Sequence[int],
        masks: Mapping[int, bytes],
        results: list[ChunkResult],
    ) -> torch.Tensor:
        """Apply penalties, bias and masks: in place, or on a copy where the raw logits are still needed for
        log-probabilities."""
        editing = [row for row in rows if _is_edited(chunks[row])]
        if not editing:
            return logits
        edited = logits.clone() if any(chunks[row].sampling.logprobs is not None for row in rows) else logits
        for row in editing:
            _edit_row(edited[row], chunks[row])
        packed = _packed_masks(list(masks.values()), logits.shape[1])
        if masks:
            self.ops.mask_rows(
                edited,
                torch.tensor(list(masks)).to(edited.device),
                torch.from_numpy(packed).to(edited.device),
            )
        nothing_left = [row for row, bits in zip(masks, packed, strict=True) if not bits.any()]
        # What is finite and not masked stays finite, so rows without a second mask need no look at their
        # logits.
        masked = [
            row
            for row in editing
            if chunks[row].sampling.allowed_token_ids is not None or _masks_stop(chunks[row])
        ]
        if masked:
            alive = torch.isfinite(edited[masked].amax(dim=-1)).tolist()
            nothing_left += [row for row, is_alive in zip(masked, alive, strict=True) if not is_alive]
        for row in nothing_left:
            results[row].error = NOTHING_LEFT
        return edited

    # -- the draw --------------------------------------------------------------------------------------------

    def _draw(self, logits: torch.Tensor, group: "SamplingMetadata") -> torch.Tensor:
        if group.num_candidates == GREEDY:
            return self.ops.argmax(logits)
        if group.num_candidates == WHOLE_VOCABULARY:
            return self.ops.draw(logits, group.temperature, group.top_p, group.min_p, group.uniform)
        return self._draw_of_top_k(logits, group)

    def _draw_of_top_k(self, logits: torch.Tensor, group: "SamplingMetadata") -> torch.Tensor:
        """Draw after top-k, then top-p and min-p over the tokens that top-k kept."""
        num_candidates = group.num_candidates
        values, token_ids, _ = self.ops.top_candidates(logits, num_candidates, group.temperature)
        # likelihoods relative to the likeliest token's
        weights = ((values - values[:, :1]) / group.temperature[:, None]).double().exp()
        weights.masked_fill_(torch.arange(num_candidates, device=values.device) >= group.top_k[:, None], 0.0)
        mass = weights.cumsum(dim=-1)
        # the token that crosses the threshold is kept
        kept = mass - weights < group.top_p[:, None] * mass[:, -1:]
        kept[:, 0] = True
        kept &= weights >= group.min_p[:, None]
        chosen = inverse_cdf(weights * kept, group.uniform)
        return token_ids.gather(1, chosen[:, None])[:, 0]


GREEDY, WHOLE_VOCABULARY = -1, 0  # special values of ``num_candidates``


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Rows of logits that are drawn from in one way, and their settings on the device, [m] each."""

    members: IntArray  # [m]: which rows of the logits
    num_candidates: int  # the largest top-k of the rows, or more; GREEDY or WHOLE_VOCABULARY
    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # float64
    uniform: torch.Tensor  # float64: the random number of each draw


def sampling_metadata(
    batch: RunningBatch, rows: IntArray, positions: IntArray, vocab_size: int, device: torch.device
) -> list[SamplingMetadata]:
    """Group these rows of the batch by the way in which they are drawn. ``positions`` [r]: number of tokens
    that each sequence has generated."""
    top_k = batch.top_k[rows]
    num_candidates = np.where(batch.is_greedy[rows], GREEDY, WHOLE_VOCABULARY)
    is_limited = (num_candidates != GREEDY) & (top_k > 0) & (top_k < vocab_size)
    if is_limited.any():
        powers_of_two = np.exp2(np.ceil(np.log2(top_k[is_limited]))).astype(np.int64)
        num_candidates[is_limited] = np.clip(powers_of_two, 64, None).clip(None, vocab_size)
    groups = []
    for kind in np.unique(num_candidates).tolist():
        members = np.flatnonzero(num_candidates == kind)
        of = rows[members]
        if kind == GREEDY:
            settings = _NO_SETTINGS
        else:
            numbers = uniforms(batch.streams[of], positions[members])
            columns = (batch.temperature[of], batch.top_p[of], batch.min_p[of], top_k[members], numbers)
            settings = to_device(np.stack(columns), device)  # one copy to the device for all settings
        temperature, top_p, min_p, limit, uniform = settings
        groups.append(
            SamplingMetadata(members, kind, temperature.float(), top_p, min_p.float(), limit, uniform)
        )
    return groups


_NO_SETTINGS = torch.empty(5, 0, dtype=torch.float64)  # greedy draws have no settings


def _is_edited(chunk: _Sampled) -> bool:
    sampling = chunk.sampling
    masks = sampling.allowed_token_ids is not None or chunk.grammar is not None or _masks_stop(chunk)
    return sampling.penalised or bool(sampling.logit_bias) or masks


def _masks_stop(chunk: _Sampled) -> bool:
    sampling = chunk.sampling
    return chunk.grammar is None and chunk.position < sampling.min_tokens and bool(sampling.stop_token_ids)


def _grammar_masks(
    chunks: Sequence[_Sampled], rows: Sequence[int], results: list[ChunkResult]
) -> dict[int, bytes]:
    """Ask the grammar of each row that has one for its mask; rows whose grammar is complete have none. A row
    whose grammar fails gets the error."""
    masks = {}
    for row in rows:
        grammar = chunks[row].grammar
        if grammar is None:
            continue
        try:
            mask = grammar.mask()
        except GrammarFault as error:
            results[row].error = str(error)
            continue
        if mask is not None:
            masks[row] = mask
    return masks


def _packed_masks(masks: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """Stack masks of one bit per token -> uint8 [len(masks), ceil(vocab_size / 8)]. A shorter mask allows no
    token beyond its end."""
    packed = np.zeros((len(masks), -(-vocab_size // 8)), dtype=np.uint8)
    for row, mask in zip(packed, masks, strict=True):
        length = min(len(row), len(mask))
        row[:length] = np.frombuffer(mask, dtype=np.uint8, count=length)
    if vocab_size % 8:
        packed[:, -1] &= (1 << vocab_size % 8) - 1
    return packed


def _edit_row(logits: torch.Tensor, chunk: _Sampled) -> None:
    """Apply penalties, bias and masks to one row [V] in place. Ids beyond the valid tokens have no logit and
    are skipped."""
    sampling = chunk.sampling
    vocab_size = logits.shape[0]

    def indices(token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64).to(logits.device)

    if sampling.repetition_penalty != 1.0:
        seen = indices([token_id for token_id in set(chunk.token_ids) if token_id < vocab_size])
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        counts = Counter(chunk.output_token_ids)
        penalties = [
            sampling.frequency_penalty * count + sampling.presence_penalty for count in counts.values()
        ]
        logits[indices(list(counts))] -= torch.tensor(penalties, dtype=torch.float32).to(logits.device)
    bias = {token_id: value for token_id, value in sampling.logit_bias if token_id < vocab_size}
    if bias:
        logits[indices(list(bias))] += torch.tensor(list(bias.values()), dtype=torch.float32).to(
            logits.device
        )
    if sampling.allowed_token_ids is not None:
        allowed = indices([token_id for token_id in sampling.allowed_token_ids if token_id < vocab_size])
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if _masks_stop(chunk):
        logits[
            indices([token_id for token_id in sampling.stop_token_ids if token_id < vocab_size])
        ] = -torch.inf
