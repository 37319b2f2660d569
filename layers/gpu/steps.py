"""One step on its way through the runner: what was prepared of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.attention import SequenceChunk
from interlace.layers.forward_context import TritonAttentionMetadata
from interlace.layers.gpu.forward import Bounds
from interlace.layers.gpu.inputs import StepInputs, StepSize
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.runner_state import RunnerRequest


class Step(NamedTuple):
    """A step whose inputs are being uploaded."""

    requests: Sequence[RunnerRequest]
    """In batch order."""
    chunks: Sequence[SequenceChunk]
    """What each of them computes."""
    bounds: Bounds
    inputs: StepInputs
    """Maybe padded."""


def chunk_lengths(output: SchedulerOutput) -> Iterator[int]:
    """Tokens, at the end of the step, of each request that computes several."""
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    computed = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return (start + counts[req_id] for req_id, start in computed if counts[req_id] > 1)


def metadata(
    make_step: Callable[[], Step], size: StepSize, tables: BlockTables, block_size: int
) -> TritonAttentionMetadata:
    """The attention metadata of a step of `size`, on the device, without padding."""
    step = make_step()
    num_tokens, num_requests = size
    inputs, bounds = step.inputs, step.bounds
    columns = -(-bounds.max_seq_len // block_size)
    return TritonAttentionMetadata(
        num_actual_tokens=num_tokens,
        max_query_len=bounds.max_query_len,
        query_start_loc=inputs.query_start_loc[: num_requests + 1],
        max_seq_len=bounds.max_seq_len,
        seq_lens=inputs.seq_lens[:num_requests],
        block_table=tables.tables[:, :columns].index_select(0, inputs.rows[:num_requests]),
        slot_mapping=inputs.slots[:num_tokens],
    )
