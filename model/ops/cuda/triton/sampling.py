"""Launches of the sampling kernels over rows of float32 logits [r, V]."""

from dataclasses import dataclass

import torch
import triton

from model.ops.cuda.triton import drawing, selection
from model.ops.cuda.triton.common import INTERPRETED
from model.ops.interface import Candidates

BLOCK = 4096  # logits of one program: 64 programs for a row of the whole vocabulary
CHUNK = 256  # logits counted at once: sixteen integers each are held in registers
CHUNK_INTERPRETED = 65536  # the interpreter takes as long for a small tensor as for a large one
NUM_PASSES = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of logits and the values that every pass over them reads."""

    logits: torch.Tensor  # float32 [r, V]
    num_blocks: int
    maxima: torch.Tensor  # float32 [r, num_blocks]
    places: torch.Tensor  # int32 [r, num_blocks]: the lowest id of each block's maximum
    not_finite: torch.Tensor  # int32 [r, num_blocks]

    @property
    def grid(self) -> tuple[int, int]:
        return self.logits.shape[0], self.num_blocks

    @property
    def mass_scale(self) -> float:
        """The integer mass of the likeliest token: a power of two, exact to multiply by, that keeps a whole
        row below 2^63."""
        return float(2 ** (62 - (self.logits.shape[1] - 1).bit_length()))

    @property
    def blocks(self) -> int:
        return int(triton.next_power_of_2(self.num_blocks))


def survey(logits: torch.Tensor) -> Rows:
    logits = logits.contiguous()
    num_rows, size = logits.shape
    num_blocks = triton.cdiv(size, BLOCK)
    maxima = logits.new_empty((num_rows, num_blocks))
    places = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    rows = Rows(logits, num_blocks, maxima, places, torch.empty_like(places))
    selection.survey_kernel[rows.grid](
        logits, maxima, places, rows.not_finite, size, NUM_BLOCKS=num_blocks, BLOCK=BLOCK
    )
    return rows


def finite_and_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell for each row whether all of it is finite, and its likeliest token: float32 [r, V] -> (bool [r],
    int64 [r])."""
    num_rows, size = logits.shape
    is_finite = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    likeliest = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        rows = survey(logits)
        selection.finish_survey_kernel[(num_rows,)](
            rows.maxima,
            rows.places,
            rows.not_finite,
            is_finite,
            likeliest,
            size,
            NUM_BLOCKS=rows.num_blocks,
            BLOCKS=rows.blocks,
        )
    return is_finite.bool(), likeliest


def _search(
    rows: Rows, temperature: torch.Tensor, top_p: torch.Tensor, k: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search for the k likeliest tokens, or for those that top_p keeps -> (states, bins) of all passes; the
    bins of the last pass are still to be evaluated (``search_state``)."""
    num_rows, size = rows.logits.shape
    states = torch.zeros(
        (NUM_PASSES, num_rows, selection.STATE.value), dtype=torch.int64, device=rows.logits.device
    )
    if k is not None:
        states[0, :, 2] = k
    bins = torch.empty(
        (2, num_rows, rows.num_blocks, selection.BINS.value), dtype=torch.int64, device=rows.logits.device
    )
    for step in range(NUM_PASSES):
        selection.search_kernel[rows.grid](
            rows.logits,
            rows.maxima,
            temperature,
            top_p,
            states,
            bins,
            step,
            num_rows,
            size,
            BY_MASS=k is None,
            MASS_SCALE=rows.mass_scale,
            NUM_BLOCKS=rows.num_blocks,
            BLOCKS=rows.blocks,
            BLOCK=BLOCK,
            CHUNK=min(BLOCK, CHUNK_INTERPRETED) if INTERPRETED else CHUNK,
        )
    return states, bins


def top_candidates(logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
    num_rows, size = logits.shape
    values = logits.new_empty((num_rows, k))
    token_ids = torch.zeros((num_rows, k), dtype=torch.int64, device=logits.device)
    log_total = logits.new_empty(num_rows)
    if num_rows == 0:
        return Candidates(values, token_ids, log_total)
    rows = survey(logits)
    states, bins = _search(rows, temperature, temperature, k)
    counts = torch.empty((num_rows, rows.num_blocks, 2), dtype=torch.int32, device=logits.device)
    sums = torch.empty_like(rows.maxima)
    sizes = {"NUM_BLOCKS": rows.num_blocks, "BLOCKS": rows.blocks, "BLOCK": BLOCK}
    drawing.count_candidates_kernel[rows.grid](
        rows.logits, rows.maxima, temperature, states, bins, counts, sums, num_rows, size, **sizes
    )
    drawing.list_candidates_kernel[rows.grid](
        rows.logits, states, bins, counts, sums, values, token_ids, log_total, num_rows, size, k, **sizes
    )
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return Candidates(values, token_ids.gather(1, order), log_total)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    num_rows, size = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return drawn
    rows = survey(logits)
    states, bins = _search(rows, temperature, top_p, None)
    masses = torch.empty((num_rows, rows.num_blocks, 2), dtype=torch.int64, device=logits.device)
    sizes = {
        "MASS_SCALE": rows.mass_scale,
        "NUM_BLOCKS": rows.num_blocks,
        "BLOCKS": rows.blocks,
        "BLOCK": BLOCK,
    }
    drawing.measure_kernel[rows.grid](
        rows.logits, rows.maxima, temperature, top_p, min_p, states, bins, masses, num_rows, size, **sizes
    )
    drawing.draw_kernel[(num_rows,)](
        rows.logits,
        rows.maxima,
        temperature,
        top_p,
        min_p,
        uniform,
        states,
        bins,
        masses,
        drawn,
        num_rows,
        size,
        **sizes,
    )
    return drawn
