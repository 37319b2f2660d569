"""Sampled tokens of a step: queued on the device, read by the host when it comes to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from interlace.engine.outputs import ModelRunnerOutput
from interlace.layers.kernels.host_copies import write_words
from interlace.layers.runner_state import RunnerRequest
from interlace.layers.sampler import NOT_FINITE


class WantedToken(NamedTuple):
    """A request whose next token a step samples."""

    request: RunnerRequest
    place: int
    """Of the request among those that the step has answers for."""
    position: int
    """Where the token will stand among the request's."""


class Mark:
    """A point on the device's current stream. Where kernels are interpreted it has passed."""

    def __init__(self, device: torch.device) -> None:
        """Passes when all that is queued by now has ended."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Until it has passed."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def has_passed(self) -> bool:
        """Never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


class StepEnd(Protocol):
    """The end of a step that was launched."""

    @property
    def has_come(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Called once."""
        ...


class EndedStep:
    """A step that was waited for already."""

    has_come = True

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        """See `StepEnd`."""
        return self._output


class NoTokens:
    """The end of a step that samples nothing. It is waited for too: else any number of steps of a
    long prompt would be under way, whatever `max_inflight_steps` says."""

    def __init__(self, device: torch.device) -> None:
        """Of what is queued by now."""
        self._end = Mark(device)

    @property
    def has_come(self) -> bool:
        """See `StepEnd`."""
        return self._end.has_passed

    def result(self) -> ModelRunnerOutput:
        """Wait for it."""
        self._end.wait()
        return ModelRunnerOutput()


class PendingTokens:
    """The tokens of one step, on their way to the host."""

    def __init__(self, sampled: Tensor, wanted: Sequence[WantedToken]) -> None:
        """Queues the copy of `sampled`, int32 [2, N], contiguous, from `greedy`. On a GPU this must
        live until the copy has ended: nobody else keeps what it is copied to."""
        self._tokens = tuple((one, one.request.tokens) for one in wanted)
        if sampled.device.type == "cuda":  # a copy would wait for saves that are on their way
            self._sampled = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
            write_words(sampled, self._sampled, sampled.numel())
        else:
            self._sampled = sampled.clone()
        self._arrived = Mark(sampled.device)

    @property
    def has_come(self) -> bool:
        """See `StepEnd`."""
        return self._arrived.has_passed

    def result(self) -> ModelRunnerOutput:
        """Wait for them; each request that still expects its token gets it."""
        self._arrived.wait()
        tokens: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str] = {}
        token_ids = self._sampled[0].tolist()
        best = self._sampled[1].view(torch.float32).tolist()
        for (request, place, position), buffer in self._tokens:
            # A request that was set back or resumed meanwhile has other tokens by now.
            if request.tokens is buffer and len(buffer) == position:
                buffer.append(token_ids[place])
            if math.isfinite(best[place]):
                tokens[request.req_id] = (token_ids[place],)
            else:
                errors[request.req_id] = NOT_FINITE.format(best[place])
        return ModelRunnerOutput(tokens, {}, errors)
