"""Serve random traffic while steps raise, until time is up; judge every token by one prefill of the whole text.

    python -m tests.soak --seconds 600 --seed 0 --model windows

An exception (RuntimeError, MemoryError, KeyboardInterrupt) comes at a random point of a step: a bytecode of the engine
at which Python looks for signals, a device call (before or after it), a wait for tokens, an allocation of pages or of
the cache, or a timer's signal. Beside it callbacks raise, requests are cancelled, weights change twice a round, and
pages are too few for all. A round is 100 requests on an engine that goes on to the next; a failure prints the command
that repeats it, up to the moments at which signals arrived.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import signal
import sys
import time

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # half of a short run is compiling
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
    import source_tree

    sys.meta_path.insert(0, source_tree.PathFinder)  # without checks of shapes, which would take most of the time

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from faults import Fault
from mla_attn.engine import DraftModel, Engine, EngineDead, NgramDrafts, Output, SamplingParams
from traffic import KINDS, MAX_LEN, assert_idle, check_tokens, collect, small_engine, some_prompt
from windows import windowed_model

GEOMETRIES = ((1, 72), (4, 18), (16, 5))  # page size and pages: for one and a half of the longest requests
ROUND = 100
MODELS = ("mla", "windows", "ngrams")
ERRORS = (RuntimeError, MemoryError, KeyboardInterrupt)
PLACES = ("point", "point", "point", "before a pass", "after a pass", "wait", "pages", "signal", "cache")


def with_weights(model, **changes):
    """A copy whose named arrays are changed."""
    other = nnx.clone(model)
    for path, change in changes.items():
        owner, *names = other, *path.split("__")
        for part in names[:-1]:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        parameter = getattr(owner, names[-1])
        parameter.set_value(change(parameter[...]))
    return other


@dataclasses.dataclass
class Asked:
    """A request, and with which model each of its tokens was made: (tokens before, model), in order."""

    prompt: list[int]
    params: SamplingParams
    raises: bool
    models: list[tuple[int, object]]


@dataclasses.dataclass
class Late:
    """Tokens for which the host waits, when ``error`` comes; at the second time they are there."""

    tokens: object
    error: BaseException | None
    ndim = 1

    def __array__(self, *arguments, **options):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return np.asarray(self.tokens)


class Soak:
    """Traffic on an engine. What it does follows from the seed, but for signals.

    Attributes:
        asked: every request so far, by id.
        found: tokens and finish reason of each.
        faults: how many were met, by place.
    """

    def __init__(self, engine: Engine, seed: int | list[int], *, raises: float = 0.0, places=("point",)):
        self.engine, self.rng, self.raises, self.places = engine, np.random.default_rng(seed), raises, places
        self.beginnings = [some_prompt(self.rng, 12, 20) for _ in range(3)]
        self.asked: dict[int, Asked] = {}
        self.found: dict[int, tuple[list[int], str | None]] = {}
        self.faults: collections.Counter = collections.Counter()
        self.points = 200  # of a step, about

    def run(self, requests: int, models=(), *, progress=lambda: None) -> collections.Counter:
        """Serve so many more requests, going on with each of ``models`` in turn; how many ended for which reason."""
        models, first = list(models), len(self.asked)
        compiles = self.engine.statistics.compiles_after_warm_up
        turns = [first + requests * (n + 1) // (len(models) + 1) for n in range(len(models))]
        steps = 0
        while len(self.asked) < first + requests or self.engine.busy:
            for _ in range(self.rng.poisson(0.7)):
                if len(self.asked) < first + requests:
                    self.add()
            if turns and len(self.asked) >= turns[0]:
                turns.pop(0)
                self.update(models.pop(0))
            self.step()
            progress()
            steps += 1
            assert steps < 200 * requests, "a request has no end"
        # Before the judge compiles programs of its own.
        assert self.engine.statistics.compiles_after_warm_up == compiles
        for name in list(self.asked)[first:]:
            self.judge(self.asked[name], *self.found[name])
        return collections.Counter(self.found[name][1] for name in list(self.asked)[first:])

    def add(self) -> None:
        rng = self.rng
        prompt = self.prompt()
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, min(20, MAX_LEN - len(prompt)), endpoint=True)),
            stop_token_ids=(int(rng.integers(13)),) if rng.random() < 0.3 else (),
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            seed=len(self.asked),
            speculation=KINDS[rng.integers(3)],
        )
        raises = rng.random() < self.raises
        try:
            name = self.engine.add_request(prompt, params, on_output=self.callback if raises else None)
        except EngineDead:
            assert self.engine._dead is not None
            return
        self.asked[name] = Asked(prompt, params, raises, [(0, self.engine.model)])
        if rng.random() < 0.05:
            self.engine.cancel(name)

    def prompt(self) -> list[int]:
        """A text of its own, after one of few beginnings, or after all that an earlier request had: its next turn."""
        rng = self.rng
        own = some_prompt(rng, 1, 12)
        if (kind := rng.random()) < 0.4:
            return self.beginnings[rng.integers(3)] + own
        ended = [name for name in list(self.found)[-20:] if self.found[name][1] is not None]
        if kind < 0.6 and ended:
            name = ended[rng.integers(len(ended))]
            return [*self.asked[name].prompt, *self.found[name][0], *own][: MAX_LEN - 4]
        return own

    def callback(self, output: Output) -> None:
        if self.rng.random() < 0.2:
            raise ValueError("as planned")

    def update(self, model) -> None:
        for request in self.engine._live.values():
            self.asked[request.id].models.append((request.num_new, model))
        self.engine.update_weights(model)

    def step(self) -> None:
        rng = self.rng
        error = rng.choice(ERRORS)("as planned") if rng.random() < 1 / 6 else None
        place = self.places[rng.integers(len(self.places))] if error is not None else ""
        if error is not None and "cache" in self.places and self.engine._in_doubt and rng.random() < 0.3:
            place = "cache"  # which is made anew now alone
        at = int(rng.integers(1, self.points + 20))
        counting = Fault()
        try:
            if place:
                with self.armed(place, error, at):
                    outputs = self.engine.step()
            elif rng.random() < 0.05:
                with counting.armed():
                    outputs = self.engine.step()
                self.points = max(counting.passed, 50)
            else:
                outputs = self.engine.step()
        except BaseException as raised:
            assert error is not None and error in chain(raised), "a step raised what nobody planned"
            self.faults[place] += 1
        else:
            collect(outputs, self.found)

    @contextlib.contextmanager
    def armed(self, place: str, error: BaseException, at: int):
        """While open, ``error`` comes at that place, once at most."""
        engine = self.engine
        if place == "point":
            with Fault(error, at).armed():
                yield
        elif place == "signal":
            with timer(error, at * 1e-5):
                yield
        elif place == "wait":
            if engine._unread:
                engine._unread[0] = dataclasses.replace(engine._unread[0], tokens=Late(engine._unread[0].tokens, error))
            yield
        elif place == "pages":
            tables = engine._scheduler.tables.all
            with once(tables[at % len(tables)].pages, "grow", error, at % 4, after=at % 2 == 0):
                yield
        elif place == "cache":
            with once(engine, "_create_device", error, 0):
                yield
        else:
            with once(engine, "_run", error, at % 4, after=place == "after a pass"):
                yield

    def judge(self, asked: Asked, tokens: list[int], reason: str | None) -> None:
        """Every token is right, and the request ended as it had to."""
        assert reason is not None
        ends = [*(n for n, _ in asked.models[1:]), len(tokens)]
        for (begin, model), end in zip(asked.models, ends, strict=True):
            check_tokens(model, [*asked.prompt, *tokens[:begin]], tokens[begin:end], asked.params)
        assert not set(tokens[:-1]) & set(asked.params.stop_token_ids)
        assert reason != "length" or len(tokens) == asked.params.max_new_tokens
        assert reason != "stop" or tokens[-1] in asked.params.stop_token_ids


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception and all that it was raised from: a signal in a check of shapes leaves as an error of that check."""
    if error is None:
        return []
    return [error, *chain(error.__cause__ or error.__context__)]


@contextlib.contextmanager
def once(owner, name: str, error: BaseException, skipped: int, *, after: bool = False):
    """While open, the method raises at its call after ``skipped`` ones: before it is run, or after."""
    method, left = getattr(owner, name), [skipped]

    def call(*arguments, **options):
        left[0] -= 1
        if left[0] != -1:
            return method(*arguments, **options)
        if after:
            method(*arguments, **options)
        raise error

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)  # the class has its own


@contextlib.contextmanager
def timer(error: BaseException, seconds: float):
    """A signal after so many seconds, whose handler raises ``error`` wherever the engine's step is."""

    def interrupt(_, frame):
        while frame is not None and frame.f_code is not Engine.step.__code__:
            frame = frame.f_back
        if frame is not None:  # not where the caller holds what a step returned
            raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def drafted(name: str, num_pages: int = 18) -> dict:
    """The model of that name, who drafts for it, and pages too few for all, as options of an engine."""
    if name == "windows":  # two models, three page tables; those with windows never run out before the others
        pages = {"full": num_pages, "window6": 4 * num_pages, "draft.full": num_pages, "draft.window5": 4 * num_pages}
        return {"model": windowed_model(), "draft": DraftModel(windowed_model((None, 5), seed=1)), "num_pages": pages}
    if name == "ngrams":
        return {"model": windowed_model((7,)), "draft": NgramDrafts(2), "num_pages": num_pages}
    return {"num_pages": num_pages}


@functools.cache
def warm_engine(page_size: int, num_pages: int, name: str = "mla") -> Engine:
    engine = small_engine(page_size=page_size, **drafted(name, num_pages))
    engine.warm_up(progress=sys.stderr.isatty())
    return engine


def one_round(seed: int, number: int, name: str = "mla", requests: int = ROUND, *, progress=lambda: None) -> Soak:
    """The round of that number, which is judged; its engine is left idle."""
    engine = warm_engine(*GEOMETRIES[number % len(GEOMETRIES)], name)
    old = engine.model
    new = with_weights(old, embed_tokens__embedding=lambda w: jnp.roll(w, 1, axis=0))
    soak = Soak(engine, [seed, number], raises=0.05, places=PLACES)
    soak.run(requests, [new, old], progress=progress)
    assert_idle(engine)
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="ROUND", help="repeat one round")
    parser.add_argument("--model", choices=MODELS, default="mla", help="cache groups and drafts (default mla: MTP)")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of callbacks that raise as planned
    begin, number = time.monotonic(), options.only or 0
    reasons, faults, tokens, done = collections.Counter(), collections.Counter(), 0, 0
    with tqdm(desc="requests", unit="request", disable=not sys.stderr.isatty()) as bar:
        while number == (options.only or 0) or (options.only is None and time.monotonic() - begin < options.seconds):
            try:
                soak = one_round(options.seed, number, options.model)
            except AssertionError as error:
                repeat = f"--seed {options.seed} --only {number} --model {options.model}"
                print(f"WRONG: {error}\nrepeat it: python -m tests.soak {repeat}")
                return 1
            reasons.update(reason for _, reason in soak.found.values())
            faults += soak.faults
            tokens += sum(len(each) for each, _ in soak.found.values())
            done, number = done + len(soak.found), number + 1
            bar.update(len(soak.found))
    engines = [warm_engine(*geometry, options.model) for geometry in GEOMETRIES[: min(number, len(GEOMETRIES))]]
    preemptions, reused = (
        sum(getattr(engine.statistics, name) for engine in engines) for name in ("preemptions", "reused_tokens")
    )
    print(
        f"{done} requests, {tokens} tokens, 0 wrong in {time.monotonic() - begin:.0f} s, seed {options.seed}: "
        f"{dict(reasons)}\n{sum(faults.values())} faults {dict(faults)}, {preemptions} preemptions, {reused} prompt "
        f"tokens reused, {2 * number} updates of weights, 0 compiles"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
