"""Draws the next token of each row of logits, batched, as each request's SamplingParams ask.

Order: penalties (repetition on prompt and generated tokens; presence and frequency on generated tokens only),
bias, masks (a grammar's last, and with it no min_tokens: its end tokens are the grammar's business);
temperature; top-k; top-p of what top-k left; min-p. Log-probabilities are those of the raw logits, before all
of it. A draw is the inverse CDF at one uniform number that depends on (seed, choice, position) alone, so
neither the batch nor a preemption changes it. Ties go to the lowest id. Nothing ever sorts the vocabulary but
a top-k that is a large part of it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from model.interface.grammar_state import GrammarFault
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, SequenceChunk, TokenLogprobs
from model.network.forward_batch import to_device
from model.ops.interface import Ops
from model.ops.reference import inverse_cdf
from model.sampling.random_streams import stream_states, uniforms

NOTHING_LEFT = (
    "No token is left to draw: allowed_token_ids, logit_bias, stop_token_ids, min_tokens and the grammar "
    "exclude every token."
)


class Sampler:
    """Samples from float32 logits [r, V] whose width is the number of valid tokens. ``sample`` may overwrite
    them."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.may_wait = (
            ops.device.type == "cpu"
        )  # for what the device has computed; elsewhere the host is to run ahead of it

    def draw(
        self, logits: torch.Tensor, groups: Sequence["DrawGroup"], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """A token per row of finite logits, as they are: int64 [r]. Waits for nothing that the device
        computes."""
        if len(groups) == 1:
            return self._draw(logits, groups[0], positions)
        drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group in groups:
            drawn[group.rows] = self._draw(logits[group.rows], group, positions[group.members])
        return drawn

    def draw_plain(
        self, logits: torch.Tensor, groups: Sequence["DrawGroup"], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """The same for any logits, which it may overwrite: -1 where a row is not finite."""
        finite = self.ops.all_finite(logits)
        if self.may_wait and bool(finite.all()):
            return self.draw(logits, groups, positions)
        odd = ~finite
        logits.masked_fill_(odd.unsqueeze(1), 0.0)  # so that it harms nobody's draw
        return self.draw(logits, groups, positions).masked_fill(odd, -1)

    def sample(self, logits: torch.Tensor, chunks: Sequence[SequenceChunk]) -> list[ChunkResult]:
        """One token per row, for the chunk of that row. A row that cannot be sampled yields an error, and
        harms no other row."""
        results = [ChunkResult() for _ in chunks]
        finite = self.ops.all_finite(logits).tolist()
        rows = []
        for row, (result, is_finite) in enumerate(zip(results, finite, strict=True)):
            if is_finite:
                rows.append(row)
            else:
                result.error = NOT_FINITE
        masks = _grammar_masks(chunks, rows, results)
        rows = [
            row
            for row in rows
            if results[row].error is None and (chunks[row].grammar is None or row in masks)
        ]
        edited = self._edit(logits, chunks, rows, masks, results)
        rows = [row for row in rows if results[row].error is None]
        if rows:
            groups = draw_groups([chunks[row].sampling for row in rows], logits.shape[1], logits.device)
            positions = np.array([chunks[row].position for row in rows])
            drawn = self.draw(edited if len(rows) == len(edited) else edited[rows], groups, positions)
            for row, token_id in zip(rows, drawn.tolist(), strict=True):
                results[row].token_ids = [token_id]
        asking = [row for row in rows if chunks[row].sampling.logprobs is not None]
        if asking:
            entries = self.logprobs(
                logits[asking],
                [results[row].token_ids[0] for row in asking],
                [chunks[row].sampling.logprobs or 0 for row in asking],
                labels=[chunks[row].sampling.logprob_token_ids for row in asking],
            )
            for row, entry in zip(asking, entries, strict=True):
                results[row].logprobs.append(entry)
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
        """Raw log-probabilities of one token and of the ``counts[i]`` likeliest, for each row of finite
        logits [r, V].

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
        chunks: Sequence[SequenceChunk],
        rows: Sequence[int],
        masks: Mapping[int, bytes],
        results: list[ChunkResult],
    ) -> torch.Tensor:
        """Penalties, bias and masks: in place, or on a copy where the raw logits are still needed for
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

    def _draw(
        self, logits: torch.Tensor, group: "DrawGroup", positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        if group.kind == "greedy":
            return self.ops.argmax(logits)
        numbers = to_device(uniforms(group.streams, positions), logits.device)
        if group.kind == "top_k":
            return self._draw_of_top_k(logits, group, numbers)
        return self.ops.draw(logits, group.temperature, group.top_p, group.min_p, numbers)

    def _draw_of_top_k(self, logits: torch.Tensor, group: "DrawGroup", numbers: torch.Tensor) -> torch.Tensor:
        """By top-k, then top-p and min-p of what top-k left."""
        num_candidates = group.num_candidates
        values, token_ids, _ = self.ops.top_candidates(logits, num_candidates, group.temperature)
        weights = (
            ((values - values[:, :1]) / group.temperature[:, None]).double().exp()
        )  # relative to the likeliest
        weights.masked_fill_(torch.arange(num_candidates, device=values.device) >= group.top_k[:, None], 0.0)
        mass = weights.cumsum(dim=-1)
        kept = (
            mass - weights < group.top_p[:, None] * mass[:, -1:]
        )  # the token that crosses the threshold is kept
        kept[:, 0] = True
        kept &= weights >= group.min_p[:, None]
        chosen = inverse_cdf(weights * kept, numbers)
        return token_ids.gather(1, chosen[:, None])[:, 0]


class DrawGroup:
    """Rows of one kind of draw, with their settings as tensors."""

    def __init__(
        self,
        kind: str,
        num_candidates: int,
        members: list[int],
        params: list[SamplingParams],
        device: torch.device,
    ) -> None:
        def column(values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
            return to_device(np.array(values, dtype=dtype), device)

        self.kind = kind
        self.num_candidates = num_candidates  # the largest top-k of the rows, or more
        self.members = np.array(members)
        self.rows = column(members, np.int64)
        self.temperature = column([p.temperature for p in params], np.float32)
        self.min_p = column([p.min_p for p in params], np.float32)
        self.top_p = column([p.top_p for p in params], np.float64)
        self.top_k = column([p.top_k for p in params], np.int64)
        self.streams = stream_states([(p.seed, p.choice) for p in params])


def draw_groups(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> list[DrawGroup]:
    """Rows with these settings, by the kind of their draw. It holds for every step of the same rows."""
    kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, sampling in enumerate(params):
        if sampling.greedy:
            kinds["greedy", 0].append(row)
        elif 0 < sampling.top_k < vocab_size:
            kinds["top_k", min(vocab_size, max(64, 1 << (sampling.top_k - 1).bit_length()))].append(row)
        else:
            kinds["whole", 0].append(row)
    return [
        DrawGroup(kind, num_candidates, members, [params[row] for row in members], device)
        for (kind, num_candidates), members in kinds.items()
    ]


def _is_edited(chunk: SequenceChunk) -> bool:
    sampling = chunk.sampling
    masks = sampling.allowed_token_ids is not None or chunk.grammar is not None or _masks_stop(chunk)
    return sampling.penalised or bool(sampling.logit_bias) or masks


def _masks_stop(chunk: SequenceChunk) -> bool:
    sampling = chunk.sampling
    return chunk.grammar is None and chunk.position < sampling.min_tokens and bool(sampling.stop_token_ids)


def _grammar_masks(
    chunks: Sequence[SequenceChunk], rows: Sequence[int], results: list[ChunkResult]
) -> dict[int, bytes]:
    """The mask of each row that has a grammar with more to come. A row whose grammar fails gets the error."""
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
    """uint8 [len(masks), vocab_size / 8] of masks of one bit per token; a shorter one allows nothing beyond
    its end."""
    packed = np.zeros((len(masks), -(-vocab_size // 8)), dtype=np.uint8)
    for row, mask in zip(packed, masks, strict=True):
        length = min(len(row), len(mask))
        row[:length] = np.frombuffer(mask, dtype=np.uint8, count=length)
    if vocab_size % 8:
        packed[:, -1] &= (1 << vocab_size % 8) - 1
    return packed


def _edit_row(logits: torch.Tensor, chunk: SequenceChunk) -> None:
    """Penalties, bias and masks of one row [V], in place. Ids beyond the valid tokens have no logit and are
    passed over."""
    sampling = chunk.sampling
    vocab_size = logits.shape[0]

    def indices(token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64).to(logits.device)

    if sampling.repetition_penalty != 1.0:
        seen = indices(
            [
                token_id
                for token_id in {*chunk.prompt_token_ids, *chunk.output_token_ids}
                if token_id < vocab_size
            ]
        )
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
