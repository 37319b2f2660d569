"""One step on its way through the runner: what was prepared of it, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from interlace.engine.outputs import ModelRunnerOutput
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


class Once:
    """A result that is waited for when somebody asks first, and kept."""

    def __init__(self, wait: Callable[[], ModelRunnerOutput]) -> None:
        """`wait` is called once, or never."""
        self._wait = wait
        self._output: ModelRunnerOutput | None = None

    def __call__(self) -> ModelRunnerOutput:
        """The result. Raises: what waiting raises."""
        if self._output is None:
            self._output = self._wait()
        return self._output

    @property
    def is_done(self) -> bool:
        """Whether it was waited for."""
        return self._output is not None
