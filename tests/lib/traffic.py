"""A small random model, and what its engine must answer: every token is judged by one prefill of the whole text.

Nothing of the engine takes part in the judgement: no page, no cache, no other request, no draft.
"""

import copy
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import small_config
from mla_attn import metadata as build
from mla_attn.engine import Engine, SamplingParams
from mla_attn.models import DeepseekForCausalLM
from mla_attn.speculative import DraftTree

CHAIN, TREE = DraftTree.chain(2), DraftTree((2, 1))
KINDS = (None, CHAIN, TREE)
MAX_LEN = 48
TIE = 2e-3


@functools.cache
def small_model(vocab_size: int = 13, *, dtype=jnp.float32, **sizes) -> DeepseekForCausalLM:
    """``sizes`` replace those of the config."""
    config = dataclasses.replace(small_config(vocab_size), **sizes)
    model = DeepseekForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0))
    # Random weights as they are would give logits that are all about equal: no token would be wrong.
    nnx.update(model, jax.tree.map(lambda w: 20 * w if w.ndim > 1 else w, nnx.state(model)))
    return model


def small_engine(kind: type[Engine] = Engine, model=None, **options) -> Engine:
    """Of the small model: four requests at a time, in pages for one and a half of the longest. Engines that differ in
    nothing that programs depend on share them, and compile each once."""
    defaults = {
        "max_batch": 4,
        "num_pages": 18,
        "page_size": 4,
        "max_len": MAX_LEN,
        "speculation": KINDS[1:],
        "prompt_tokens": 16,
        "batches": (4,),
    }
    engine = kind(model or small_model(), **{**defaults, **options})
    facts = (engine._passes.shapes, engine._cache, engine.max_batch, engine.speculation, engine._draft)
    key = (kind, id(engine.model), facts, options.get("implementation"), os.environ.get("MLA_ATTN_IMPLEMENTATION"))
    first = _engines.setdefault(key, engine)
    engine._passes, engine._drafting = copy.copy(first._passes), first._drafting  # each with weights of its own
    return engine


_engines: dict[tuple, Engine] = {}  # the first of each kind, whose programs the others run


def some_prompt(rng, least=1, most=20) -> list[int]:
    return rng.integers(13, size=rng.integers(least, most, endpoint=True)).tolist()


def collect(outputs, into=None) -> dict[int, tuple[list[int], str | None]]:
    """Tokens and finish reason of each request; nothing comes after a reason."""
    found = into if into is not None else {}
    for output in outputs:
        tokens, reason = found.get(output.request_id, ([], None))
        assert reason is None
        found[output.request_id] = (tokens + output.tokens, output.finish_reason)
    return found


def serve(engine, prompt, **params) -> list[int]:
    """Tokens of one request."""
    name = engine.add_request(prompt, SamplingParams(**params))
    tokens, reason = collect(engine.run())[name]
    assert reason in ("stop", "length")
    return tokens


def assert_idle(engine) -> None:
    """Nothing is left of any request but what the prefix cache keeps."""
    assert not engine.busy
    assert engine.step() == []
    statistics = engine.statistics
    assert (statistics.waiting, statistics.running) == (0, 0)
    assert statistics.pages_used == 0
    engine.clear_prefix_cache()
    assert engine.statistics.pages_idle == 0


def logits_of(model, tokens) -> np.ndarray:
    """float32 [len(tokens), vocab], from one prefill."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_prefill(model, padded, np.int32(len(tokens))))[: len(tokens)]


@nnx.jit
def _prefill(model, tokens, length):
    table = jnp.zeros((1, MAX_LEN), jnp.int32)
    metadata = build.for_extend(table, length[None], length[None], max_q_len=MAX_LEN, num_rows=MAX_LEN, page_size=1)
    pools, by_group = model.create_pools(num_pages=1, page_size=1), {g.name: metadata for g in model.cache_groups}
    return model.logits(model(tokens, pools, by_group, mode="prefill")[0])


def check_tokens(model, prompt, tokens, params: SamplingParams, *, tie: float = TIE) -> None:
    """Each token is the one that greedy or seeded decoding has after those before it, up to ties."""
    if not tokens:
        return
    logits = logits_of(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].astype(float)
    for step, token in enumerate(tokens):
        scores = logits[step]
        if params.temperature:
            scores = scores / params.temperature
            sure, possible = (_kept(scores, params, slack) for slack in (-tie, tie))
            assert possible[token], f"token {step} of {tokens} is outside top-k or top-p"
            key = jax.random.fold_in(jax.random.key(np.uint32(params.seed)), len(prompt) + step - 1)
            scores = np.where(
                sure | (np.arange(len(scores)) == token), scores + jax.random.gumbel(key, scores.shape), -np.inf
            )
        assert scores[token] > scores.max() - tie, f"token {step} of {tokens} is {scores.max() - scores[token]} short"


def _kept(scores, params, slack):
    """What top-k and top-p leave, with the edge moved by ``slack``."""
    best = np.sort(scores)[::-1]
    edge = best[params.top_k - 1] if params.top_k else -np.inf
    p = np.where(best >= edge, np.exp(best - best[0]), 0)
    before = np.cumsum(p) / p.sum() - p / p.sum()
    edge = max(edge, best[np.flatnonzero((before < params.top_p + slack) & (p > 0))[-1]]) if params.top_p < 1 else edge
    return scores >= edge - slack
