"""From applied tokens to deltas: text, stop strings, and the mailboxes of those who wait.

Runs on the loop thread, right after a step was applied. An exception raised here while handling
one request ends that request alone. Knows nothing of blocks or steps.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from interlace.engine.errors import EngineDeadError
from interlace.engine.events import EventBus, RequestFinished, RequestFirstToken
from interlace.engine.mailbox import Mailbox
from interlace.engine.outputs import RequestOutput, TokenLogprobs
from interlace.engine.ports import Clock
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler import RequestUpdate, Scheduler
from interlace.engine.text_stream import TextStream
from interlace.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Caller:
    """Who waits for one request, and the text made of it so far."""

    request: Request
    mailbox: Mailbox
    text: TextStream | None


class OutputProcessor:
    """One caller per unfinished request."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        clock: Clock,
        events: EventBus,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._clock = clock
        self._events = events
        self._callers: dict[str, _Caller] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def add_request(self, request: Request, mailbox: Mailbox) -> None:
        """Deliver what comes of `request` to `mailbox`, until its last delta."""
        text = None
        if request.sampling_params.detokenize and self._tokenizer is not None:
            text = TextStream(self._tokenizer, request.prompt_token_ids, request.sampling_params)
        self._callers[request.request_id] = _Caller(request, mailbox, text)

    def process(self, updates: Iterable[RequestUpdate]) -> None:
        """Turn one applied step into deltas; finishes requests whose text has stopped."""
        for update in updates:
            caller = self._callers.get(update.request.request_id)
            if caller is None or caller.request is not update.request:
                continue
            try:
                self._process_one(caller, update)
            except Exception as error:
                logger.exception("request %s failed in its text", update.request.request_id)
                self._fail_one(caller, error, update.new_token_ids, update.logprobs)

    def _process_one(self, caller: _Caller, update: RequestUpdate) -> None:
        request = update.request
        if self._events.active and 0 < request.num_output_tokens == len(update.new_token_ids):
            self._events.emit(RequestFirstToken(self._clock.monotonic(), request.request_id))
        text, token_ids, logprobs = "", update.new_token_ids, update.logprobs
        if caller.text is not None and token_ids:
            hide_last = request.status is RequestStatus.FINISHED_STOPPED
            delta = caller.text.push(token_ids, hide_last=hide_last)
            text = delta.text
            if delta.stop is not None:
                token_ids = token_ids[: delta.num_tokens_used]
                logprobs = logprobs and logprobs[: delta.num_tokens_used]
                self._stop_at_string(request, delta.stop)
        if request.is_finished:
            self._deliver_last(caller, text, token_ids, logprobs)
        else:
            caller.mailbox.put(RequestOutput(request.request_id, text, token_ids, logprobs))

    def _stop_at_string(self, request: Request, stop: str) -> None:
        """A stop string outranks a stop by length that the same token brought."""
        if request.is_finished:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = stop
        else:
            self._scheduler.finish_request(
                request, RequestStatus.FINISHED_STOPPED, stop_reason=stop
            )

    def _deliver_last(
        self,
        caller: _Caller,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        request = caller.request
        if caller.text is not None:
            text += caller.text.finish()
            capped = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
            if capped and caller.text.matched is not None:
                self._stop_at_string(request, caller.text.matched)
        del self._callers[request.request_id]
        reason = request.status.finish_reason
        assert reason is not None
        # Here and not where the scheduler ends it: text has the last word on the reason.
        if self._events.active:
            self._events.emit(
                RequestFinished(
                    self._clock.monotonic(), request.request_id, reason, request.num_output_tokens
                )
            )
        caller.mailbox.put(
            RequestOutput(
                request.request_id,
                text,
                token_ids,
                logprobs,
                finish_reason=reason,
                stop_reason=request.stop_reason,
                error=request.error,
                usage=request.usage(),
                kv_transfer_params=request.response_kv_transfer_params,
            )
        )

    def _fail_one(
        self,
        caller: _Caller,
        error: Exception,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        """End one request because of `error`, without the text that may have raised it."""
        caller.text = None
        request = caller.request
        self._scheduler.finish_request(request, RequestStatus.FINISHED_ERROR)
        request.status = RequestStatus.FINISHED_ERROR  # also where the token had ended it
        request.error = f"{type(error).__name__}: {error}"
        self._deliver_last(caller, "", token_ids, logprobs)

    def abort(self, request_id: str) -> bool:
        """End a request for its caller and the scheduler; False if it is not known (any more)."""
        caller = self._callers.get(request_id)
        if caller is None:
            return False
        self._scheduler.finish_request(caller.request, RequestStatus.FINISHED_ABORTED)
        try:
            self._deliver_last(caller)
        except Exception as error:
            logger.exception("request %s failed in its last text", request_id)
            self._fail_one(caller, error)
        return True

    def abort_all(self) -> None:
        """End every request for its caller and the scheduler."""
        for request_id in list(self._callers):
            self.abort(request_id)

    def fail_all(self, error: Callable[[], EngineDeadError]) -> None:
        """Give every caller an error in place of a last delta."""
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.mailbox.fail(error())
