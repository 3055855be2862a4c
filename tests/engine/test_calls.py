"""Any order of calls to an engine, against what one request at a time would give."""

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mla_attn.engine import QueueFull, SamplingParams
from recorder import programs_kept
from traffic import KINDS, check_tokens, small_engine

WAITING = 5


@functools.cache
def shared_engine():
    engine = small_engine(max_waiting=WAITING)
    engine.warm_up(progress=False)
    return engine


params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 16),
    stop_token_ids=st.sampled_from([(), (0, 5)]),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 3),
    speculation=st.sampled_from(KINDS),
)
# Few texts, so that beginnings are common.
prompts = st.builds(
    lambda text, length, end: [*np.resize(text, length).tolist(), *end],
    st.sampled_from([[1, 2, 3], [7]]),
    st.integers(1, 18),
    st.lists(st.integers(0, 12), max_size=3),
)


class Calls(RuleBasedStateMachine):
    """Beside the engine runs what is known of each request: its tokens so far, and how it may end."""

    @initialize()
    def begin(self):
        self.engine = shared_engine()
        assert not self.engine.busy
        self.live, self.cancelled = {}, set()

    @rule(prompt=prompts, params=params)
    def add(self, prompt, params):
        try:
            name = self.engine.add_request(prompt, params)
        except QueueFull:
            assert len(self.live) >= WAITING
            return
        assert len(self.live) < WAITING + 8
        self.live[name] = (prompt, params, [])

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.take(self.engine.step())

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.cancel(name)
        self.cancelled.add(name)

    @rule()
    def drain(self):
        self.take(self.engine.run())
        assert not self.live

    def take(self, outputs):
        for output in outputs:
            prompt, params, tokens = self.live[output.request_id]  # nothing comes after the end
            tokens += output.tokens
            stops = [t for t in tokens if t in params.stop_token_ids]
            ended = bool(stops) or len(tokens) == params.max_new_tokens
            if output.finish_reason == "cancelled":
                assert output.request_id in self.cancelled
                assert not ended
            else:
                assert output.finish_reason == ("stop" if stops else "length" if ended else None)
                assert output.tokens
                assert stops in ([], tokens[-1:])
                assert len(tokens) <= params.max_new_tokens
            if output.finish_reason is not None:
                check_tokens(self.engine.model, prompt, tokens, params)
                assert not self.engine.cancel(output.request_id)
                del self.live[output.request_id]

    @invariant()
    def counts_agree(self):
        statistics = self.engine.statistics
        assert statistics.waiting + statistics.running == len(self.live)
        assert statistics.running <= 8  # four with a slot, four whose last tokens are on the way
        assert statistics.waiting <= WAITING + 4  # preempted ones wait too
        assert self.engine.busy or not self.live
        assert statistics.pages_used + statistics.pages_idle <= 18
        assert (statistics.pages_used > 0) == (statistics.running > 0)

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()
            self.take(self.engine.step())
            self.engine.clear_prefix_cache()
            assert self.engine.statistics.pages_idle == 0


@pytest.mark.slow
def test_any_order_of_calls(tmp_path_factory):
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        run_state_machine_as_test(
            Calls,
            settings=settings(
                max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
