"""Sampled tokens of a step: queued on the device, read by the host when it comes to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from interlace.engine.outputs import ModelRunnerOutput
from interlace.layers.batch_sampler import SampledBatch
from interlace.layers.device_copies import to_host
from interlace.layers.runner_state import RunnerRequest
from interlace.layers.sampler import NOT_FINITE


class PendingTokens:
    """The tokens of one step, on their way to the host."""

    def __init__(
        self, sampled: SampledBatch, requests: Sequence[RunnerRequest], positions: Sequence[int]
    ) -> None:
        """Queues the copies. `positions`: where each token will stand among its request's."""
        self._requests = tuple(zip(requests, [r.tokens for r in requests], positions, strict=True))
        self._token_ids = to_host(sampled.token_ids)
        self._best = to_host(sampled.best)
        self._arrived: torch.cuda.Event | None = None
        if sampled.token_ids.device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def result(self) -> ModelRunnerOutput:
        """Wait for them; each request that still expects its token gets it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str] = {}
        for (request, buffer, position), token_id, best in zip(
            self._requests, self._token_ids.tolist(), self._best.tolist(), strict=True
        ):
            # A request that was set back or resumed meanwhile knows other tokens by now.
            if request.tokens is buffer and len(buffer) == position:
                buffer.append(token_id)
            if math.isfinite(best):
                tokens[request.req_id] = (token_id,)
            else:
                errors[request.req_id] = NOT_FINITE.format(best)
        return ModelRunnerOutput(tokens, {}, errors)
