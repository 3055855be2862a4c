"""From the tokens of passes to outputs: what requests got, kept until somebody takes it."""

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
    """Tokens on their way.

    Attributes:
        number: of launches before it.
        requests: rows of the batch and whose they are.
        tokens: [B] or, of verify passes, [B, depth + 1] with -1 after the emitted ones.
        rows: most rows a request gains; 0 for prompts.
        stops: of prompts, rows computed with this pass, for each of ``requests``.
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
    begin: int  # tokens that the request had before
    now: float
    counted: bool = False
    told: bool = False
    raised: BaseException | None = None  # by the callback


class Outbox:
    """Gives requests their tokens and their ends, and tells their callbacks.

    An output is handed out as a whole, at whatever point an exception cuts that short: once ``_current`` is set it has
    happened, and ``redo`` does what is left of it. Nothing else changes a request's tokens.

    Args:
        scheduler: requests that end are removed from it.
        live: requests by id; those that end are removed from it.
        counters: to add to.

    Attributes:
        outputs: not yet taken, oldest first.
        in_callback: whether a callback runs.
        interrupt: a KeyboardInterrupt or SystemExit that a callback raised, for the end of the step.
    """

    def __init__(self, scheduler: Scheduler, live: dict[int, Request], counters: Counters):
        self.outputs: list[Output] = []
        self.in_callback = False
        self.interrupt: BaseException | None = None
        self._scheduler, self._live, self._counters = scheduler, live, counters
        self._current: _HandOut | None = None

    def account_prompt(self, request: Request, stop: int, token: int) -> None:
        """A pass over a prompt was read: its rows up to ``stop`` are computed; after the last comes its token."""
        if token == INVALID_TOKEN:
            self._end_invalid(request, [])
            return
        request.num_accounted = stop
        self._scheduler.keep_prefix(request, all_pages=False)
        if stop == request.prompt_rows:
            request.num_passes_in_flight -= 1
            self._emit(request, [token])

    def account_tokens(self, request: Request, rows: int, tokens: list[int]) -> None:
        """A decode pass, or a verify pass of several rows, was read.

        Args:
            request: whose.
            rows: the most that it could gain.
            tokens: what was emitted; -1 is none.
        """
        new = [token for token in tokens if token >= 0]
        request.num_passes_in_flight -= 1
        request.num_rows_in_flight -= rows
        request.num_decoded_rows += len(new)
        kept = self._emit(request, new, invalid=INVALID_TOKEN in tokens)
        if len(tokens) > 1:
            self._counters.verified_tokens += kept
            self._counters.verified_requests += 1

    def _emit(self, request: Request, new: list[int], *, invalid: bool = False) -> int:
        """Give a request its next tokens, up to a stop token or its length; returns how many those were.

        ``invalid`` says that the token after them is none: it ends the request unless one of these does.
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
        """Give a request its next tokens. With a ``reason`` it ends; ``keep`` is whether its pages may be reused."""
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
        """The part of what was cut short that concerns the request; to be followed by ``tell_again`` once the scheduler
        is made anew."""
        if self._current is not None:
            if not any(output is self._current.output for output in self.outputs):
                self.outputs.append(self._current.output)
            self._record(self._current)

    def tell_again(self) -> None:
        """The part that concerns the callback: to call it, or to deal with what it raised."""
        current = self._current
        if current is not None and not current.told:
            self._tell(current)
        elif current is not None and current.raised is not None:
            self._fail(current, current.raised)
        self._current = None

    def _record(self, current: _HandOut) -> None:
        """Bring a request to where it is after an output. Done twice, it is as done once."""
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
        current.counted = True  # nothing is called from here on, so no interrupt is raised
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
        """Call back. Whatever that raises, other requests' tokens must not be lost by it."""
        request = current.request
        tell = request.on_output  # once: a stream that is left, in whatever thread, takes it away
        if tell is None:
            return
        try:
            self.in_callback = current.told = True
            tell(current.output)
        except BaseException as error:
            current.raised = error  # first: from here on ``tell_again`` knows
            self.in_callback = False
            self._fail(current, error)
        finally:
            self.in_callback = False

    def _fail(self, current: _HandOut, error: BaseException) -> None:
        """End a request whose callback raised."""
        request = current.request
        request.on_output = None
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self.interrupt = error
        logger.error("the callback of request %d raised", request.id, exc_info=error)
        if not request.finished:
            self.hand_out(request, (), "error", error)
