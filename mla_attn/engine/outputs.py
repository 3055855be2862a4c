"""The outputs of requests: built from the tokens of passes, and kept until ``step()`` or ``run()`` returns them."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from mla_attn.engine.requests import Output
from mla_attn.engine.scheduler import Request, Scheduler
from mla_attn.engine.statistics import Counters
from mla_attn.passes import INVALID_TOKEN

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launched pass whose tokens were not read yet.

    Attributes:
        number: number of launches before it.
        requests: rows of the batch and their requests.
        tokens: [B]; for verify passes [B, depth + 1] with -1 after the emitted tokens.
        rows: most rows that a request gains; 0 for prompts.
        stops: for prompts, the number of rows computed including this pass, for each of ``requests``.
    """

    number: int
    requests: list[tuple[int, Request]]
    tokens: Any
    rows: int = 0
    stops: tuple[int, ...] = ()


@dataclasses.dataclass
class _HandOut:
    request: Request
    output: Output
    begin: int  # number of tokens that the request had before
    now: float
    counted: bool = False
    told: bool = False
    raised: BaseException | None = None  # exception of the callback


class Outbox:
    """Appends tokens to requests, ends requests, and calls their callbacks.

    An output is delivered completely even if an exception interrupts the delivery at any point: once ``_current`` is
    set, ``record_again`` and ``tell_again`` finish it. Nothing else changes a request's tokens.

    Args:
        scheduler: the scheduler, from which ended requests are removed.
        live: requests by id, from which ended requests are removed.
        counters: counters to add to.

    Attributes:
        outputs: outputs that were not returned yet, oldest first.
        in_callback: whether a callback is running.
        interrupt: a KeyboardInterrupt or SystemExit from a callback, to be raised at the end of the step.
    """

    def __init__(self, scheduler: Scheduler, live: dict[int, Request], counters: Counters):
        self.outputs: list[Output] = []
        self.in_callback = False
        self.interrupt: BaseException | None = None
        self._scheduler, self._live, self._counters = scheduler, live, counters
        self._current: _HandOut | None = None

    def account_prompt(self, request: Request, stop: int, token: int) -> None:
        """Records a prompt pass that was read: rows up to ``stop`` are computed; the last row gives a token."""
        if token == INVALID_TOKEN:
            self._end_invalid(request, [])
            return
        request.num_accounted = stop
        self._scheduler.keep_prefix(request, all_pages=False)
        if stop == request.prompt_rows:
            request.num_passes_in_flight -= 1
            self._emit(request, [token])

    def account_tokens(self, request: Request, rows: int, tokens: list[int]) -> None:
        """Records a decode or verify pass that was read.

        Args:
            request: the request.
            rows: most rows that it could gain.
            tokens: emitted tokens; -1 means no token.
        """
        new = [token for token in tokens if token >= 0]
        request.num_passes_in_flight -= 1
        request.num_rows_in_flight -= rows
        request.num_decoded_rows += len(new)
        kept = self._emit(request, new, invalid=INVALID_TOKEN in tokens)
        if not request.finished:
            self._scheduler.keep_new_pages(request)
        if len(tokens) > 1:
            self._counters.verified_tokens += kept
            self._counters.verified_requests += 1

    def _emit(self, request: Request, new: list[int], *, invalid: bool = False) -> int:
        """Appends tokens up to a stop token or the request's length; returns how many were appended.

        ``invalid`` says that the logits after them are not finite: this ends the request unless one of the tokens does.
        """
        new = new[: request.params.max_new_tokens - request.num_new]
        if not request.stops.isdisjoint(new):
            stop = next(i for i, token in enumerate(new) if token in request.stops)
            new = new[: stop + 1]
            self.hand_out(request, new, "stop")
        elif request.num_new + len(new) == request.params.max_new_tokens:
            self.hand_out(request, new, "length")
        elif invalid:
            self._end_invalid(request, new)
        else:
            self.hand_out(request, new)
        return len(new)

    def _end_invalid(self, request: Request, new: list[int]) -> None:
        self._counters.invalid_logits += 1
        error = FloatingPointError(f"the logits after {request.num_tokens + len(new)} tokens are not all finite")
        self.hand_out(request, new, "error", error, keep=False)

    def hand_out(
        self,
        request: Request,
        new: Sequence[int],
        reason: str | None = None,
        error: BaseException | None = None,
        *,
        keep: bool = True,
    ) -> None:
        """Appends tokens to a request. A ``reason`` ends it; ``keep`` says whether its pages may be reused."""
        output = Output(request.id, list(new), reason, error, request.params.seed)
        current = _HandOut(request, output, request.num_tokens, time.perf_counter())
        self._current = current
        self.outputs.append(output)
        self._record(current)
        if reason is not None:
            self._scheduler.remove(request, keep=keep)
        self._tell(current)
        self._current = None

    def record_again(self) -> None:
        """Finishes the request's part of an interrupted delivery; call ``tell_again`` after the scheduler was reset."""
        if self._current is not None:
            if not any(output is self._current.output for output in self.outputs):
                self.outputs.append(self._current.output)
            self._record(self._current)

    def tell_again(self) -> None:
        """Finishes the callback's part of an interrupted delivery: calls it, or handles its exception."""
        current = self._current
        if current is not None and not current.told:
            self._tell(current)
        elif current is not None and current.raised is not None:
            self._fail(current, current.raised)
        self._current = None

    def _record(self, current: _HandOut) -> None:
        """Updates the request for an output; idempotent."""
        request, output = current.request, current.output
        end = current.begin + len(output.tokens)
        request.tokens[current.begin : end] = output.tokens
        if not current.counted:
            self._count(current)
        request.num_tokens = end
        if output.finish_reason is not None:
            request.finished = True
            self._live.pop(request.id, None)

    def _count(self, current: _HandOut) -> None:
        request, output, counters = current.request, current.output, self._counters
        num_tokens = len(output.tokens)
        current.counted = True  # no calls below, so no interrupt can be raised in between
        if num_tokens:
            if current.begin == request.prompt_len:
                counters.first_token_seconds += current.now - request.arrived
                counters.first_tokens += 1
            else:
                counters.later_token_seconds += current.now - request.last_token
            request.last_token, request.num_faults = current.now, 0
            counters.new_tokens += num_tokens
        if output.finish_reason == "cancelled":
            counters.cancelled += 1
        elif output.finish_reason == "error":
            counters.failed += 1
        elif output.finish_reason is not None:
            counters.finished += 1

    def _tell(self, current: _HandOut) -> None:
        """Calls the request's callback. Its exceptions must not lose other requests' tokens."""
        request = current.request
        tell = request.on_output  # read once: a stream that is abandoned in another thread sets it to None
        if tell is None:
            return
        try:
            self.in_callback = current.told = True
            tell(current.output)
        except BaseException as error:
            current.raised = error  # set first, for ``tell_again``
            self.in_callback = False
            self._fail(current, error)
        finally:
            self.in_callback = False

    def _fail(self, current: _HandOut, error: BaseException) -> None:
        """Ends a request whose callback raised."""
        request = current.request
        request.on_output = None
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self.interrupt = error
        logger.error("the callback of request %d raised", request.id, exc_info=error)
        if not request.finished:
            self.hand_out(request, (), "error", error)
