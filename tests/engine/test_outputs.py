"""Outputs are handed out whole and once, at whatever point an exception cuts that short. No device."""

import logging

import pytest

from faults import Fault
from mla_attn.engine import SamplingParams
from mla_attn.engine.outputs import Outbox
from mla_attn.engine.scheduler import CacheSizes, Limits, Request, Scheduler
from mla_attn.engine.statistics import Counters
from mla_attn.passes import INVALID_TOKEN


class Served:
    """A request that runs, with one token so far."""

    def __init__(self, on_output=None, **params):
        limits = {"max_batch": 2, "max_len": 48, "max_waiting": 4, "prompt_tokens": 16}
        limits = Limits(**limits, prompts_per_pass=4, prompt_chunk=16)
        self.counters = Counters()
        self.scheduler = Scheduler(limits, CacheSizes(num_pages=12, page_size=4, prefix_cache=True), self.counters)
        params = SamplingParams(**{"max_new_tokens": 6, **params})
        self.request = Request(0, [1, 2, 3, 4, 5], params, on_output, 0.0)
        self.live = {0: self.request}
        self.outbox = Outbox(self.scheduler, self.live, self.counters)
        self.scheduler.waiting.append(self.request)
        self.scheduler.admit()
        self.request.num_computed, self.request.num_passes_in_flight = 5, 1
        self.outbox.account_prompt(self.request, 5, 7)

    def decode(self, tokens):
        self.request.num_passes_in_flight, self.request.num_rows_in_flight = 1, len(tokens)
        self.outbox.account_tokens(self.request, len(tokens), tokens)

    def recover(self):
        """What the engine does after a fault."""
        self.outbox.record_again()
        self.scheduler.reset(sorted(self.live.values(), key=lambda r: r.id))
        self.outbox.tell_again()

    @property
    def tokens(self):
        return self.request.tokens[self.request.prompt_len : self.request.num_tokens].tolist()

    @property
    def handed_out(self):
        return [token for output in self.outbox.outputs for token in output.tokens]


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([8, 9, -1], [8, 9], None),
        ([8, 3, 9], [8, 3], "stop"),
        ([8] * 9, [8] * 5, "length"),
        ([8, INVALID_TOKEN, -1], [8], "error"),
        ([8, 3, INVALID_TOKEN], [8, 3], "stop"),
        ([INVALID_TOKEN], [], "error"),
    ],
)
def test_tokens_of_a_pass(tokens, kept, reason):
    served = Served(stop_token_ids=(3,))
    served.decode(tokens)
    output = served.outbox.outputs[-1]
    assert (output.tokens, output.finish_reason) == (kept, reason)
    assert served.tokens == served.handed_out == [7, *kept]
    assert served.request.finished == (reason is not None) == (0 not in served.live)
    assert (served.scheduler.pages.num_used > served.scheduler.prefixes.num_pages) == (reason is None)
    assert isinstance(output.error, FloatingPointError) == (reason == "error")
    counts = served.counters
    assert (counts.finished, counts.failed) == (int(reason in ("stop", "length")), int(reason == "error"))


def points(tokens, **params):
    counting, served = Fault(), Served(lambda _: None, **params)
    with counting.armed():
        served.decode(tokens)
    return counting.passed


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [[8, 9], [8, 3], [INVALID_TOKEN]], ids=["more", "stop", "invalid"])
def test_cut_short_at_any_point(tokens, error, caplog):
    caplog.set_level(logging.CRITICAL)
    count, undone = points(tokens, stop_token_ids=(3,)), 0
    assert count > 10
    for at in range(1, count + 1):
        told = []
        served = Served(told.append, stop_token_ids=(3,))
        try:
            with Fault(error(), at).armed():
                served.decode(tokens)
        except error:
            served.recover()
            served.recover()  # that was cut short too
        outputs = served.outbox.outputs
        # What is raised in the callback's place is taken for the callback's: it is not told of that.
        assert told == outputs or outputs[-1].error is not None
        assert told == outputs[: len(told)] and len(outputs) - len(told) <= 1
        assert served.tokens == served.handed_out
        assert served.tokens in ([7], [7, *(t for t in tokens if t >= 0)])
        undone += served.tokens == [7] and not served.request.finished
        ended = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert len(ended) == served.request.finished <= 1
        assert list(served.live) == ([] if served.request.finished else [0])
        counts = served.counters
        assert counts.finished + counts.failed == len(ended)
        assert counts.new_tokens == len(served.tokens)
    assert 0 < undone < count


def test_a_callback_is_told_of_its_end_but_not_of_what_it_raised(caplog):
    caplog.set_level(logging.CRITICAL)
    told = []

    def callback(output):
        told.append(output)
        if len(told) == 2:
            raise ValueError("no more")

    served = Served(callback)
    served.decode([8])
    assert [o.finish_reason for o in served.outbox.outputs] == [None, None, "error"]
    assert told == served.outbox.outputs[:2]
