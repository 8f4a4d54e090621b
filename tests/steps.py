"""Steps as runners of tests see them: a sequence after the other, each with all that is known of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.interface.grammar_state import GrammarState
from model.interface.running_batch import GLOBAL, LOCAL
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import StepInput


@dataclass(slots=True)
class StepSequence:
    """What one sequence computes in a step: ``token_ids`` from position ``start`` on."""

    row: int
    token_ids: list[int]
    start: int
    samples: bool
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    global_block_table: list[int]
    local_block_table: list[int]
    prompt_targets: list[int] = field(default_factory=list)
    grammar: GrammarState | None = None
    pooling: bool = False


def sequences_of(step: StepInput) -> list[StepSequence]:
    """The decodes, then the chunks. Tokens that are not known yet are missing."""
    batch = step.batch
    known: list[list[int]] = [[]] * len(step.decodes)
    if step.token_ids is not None:
        known = [[token_id] for token_id in step.token_ids.tolist()]
    parts: list[tuple[int, list[int], int, bool, Sequence[int], bool]] = [
        (row, token_ids, start, True, (), False)
        for row, token_ids, start in zip(step.decodes.tolist(), known, step.starts.tolist(), strict=True)
    ]
    parts += [
        (chunk.row, list(chunk.token_ids), chunk.start, chunk.samples, chunk.prompt_targets, chunk.pooling)
        for chunk in step.prefills
    ]
    sequences = []
    for row, token_ids, start, samples, targets, pooling in parts:
        count = int(batch.num_prompt_tokens[row])
        length = int(batch.num_blocks[row])
        sequences.append(
            StepSequence(
                row=row,
                token_ids=token_ids,
                start=start,
                samples=samples,
                sampling=batch.sampling[row],
                prompt_token_ids=batch.token_ids[row][:count],
                output_token_ids=batch.token_ids[row][count:],
                global_block_table=batch.blocks[GLOBAL, row, :length].tolist(),
                local_block_table=batch.blocks[LOCAL, row, :length].tolist(),
                prompt_targets=list(targets),
                grammar=batch.grammars[row],
                pooling=pooling,
            )
        )
    return sequences
