# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding in the engine
#
# Speculative decoding drafts several tokens cheaply, then verifies them in one pass of the model. One engine runs plain
# and speculative requests together. This notebook shows that speculation does not change tokens, how many drafts are
# accepted, and what a round of drafting and verifying costs and gains. It runs on a CPU in a few minutes, nearly all of
# them for compiling. [The quickstart](quickstart.ipynb) explains the paged cache.

# %%
import itertools
import pathlib
import time

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_attn.engine import DraftModel, Engine, NgramDrafts, SamplingParams
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree

# %% [markdown]
# `tests/fixtures/deepseek-v3-tiny` is a small trained model in the format of DeepSeek-V3, with its
# multi-token-prediction (MTP) layer, which drafts. A draft tree "3x2" has three candidates after the last token and two
# after each of them; "1x1x1" is a chain of three. A request uses one of the engine's draft trees, or none; each tree
# adds programs to compile. The prefix cache is off so that repeated requests do equal work.

# %%
here = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path.cwd()
model = load_checkpoint(here.parent / "tests" / "fixtures" / "deepseek-v3-tiny", dtype=jnp.float32)
chain, tree = DraftTree.parse("1x1x1"), DraftTree.parse("3x2")
kinds = {"off": None, "chain 1x1x1": chain, "tree 3x2": tree}
speculative = {name: kind for name, kind in kinds.items() if kind is not None}

engine = Engine(
    model,
    max_batch=2,
    num_pages=12,
    page_size=16,
    max_len=96,
    prompt_tokens=64,
    speculation=(chain, tree),
    prefix_cache=False,
)
engine.warm_up(progress=False)
print(engine.statistics.programs, "programs")

# %% [markdown]
# ## Same tokens
#
# Six requests have the same prompt: greedy and at temperature 0.8, each without speculation, with a chain of three
# drafts and with a tree. The engine runs two at a time and admits the next one when one of them ends. Requests with
# different trees share the cache and the engine's steps; each kind has its own passes within a step.

# %%
NEW = 48
prompt = [256, *b"This program is free software"]  # token ids are bytes; 256 is the begin token


def serve(requests):
    """The outputs of each request, each a list of the tokens that the engine returned together."""
    ids = [engine.add_request(tokens, params) for tokens, params in requests]
    pieces = {request: [] for request in ids}
    for output in engine.run():
        pieces[output.request_id].append(output.tokens)
    return [pieces[request] for request in ids]


def params(kind, temperature=0.0):
    return SamplingParams(max_new_tokens=NEW, speculation=kind, temperature=temperature, seed=7)


cases = [(temperature, name) for temperature in (0.0, 0.8) for name in kinds]
served = dict(zip(cases, serve([(prompt, params(kinds[name], t)) for t, name in cases]), strict=True))
for temperature, name in cases:
    pieces = served[temperature, name]
    tokens = list(itertools.chain(*pieces))
    assert tokens == list(itertools.chain(*served[temperature, "off"]))
    if name == "off":
        print(f"temperature {temperature}: {bytes(t for t in tokens if t < 256)}, {len(pieces)} outputs of one token")
    else:
        print(f"  {name}: the same, in {len(pieces)} outputs of {', '.join(str(len(piece)) for piece in pieces)}")

# %% [markdown]
# At a temperature above 0, speculative sampling keeps the distribution of tokens (arXiv:2211.17192). This engine keeps
# the tokens themselves: a sample is the largest logit plus Gumbel noise, and the noise depends only on the request's
# seed and the token's position. So the target samples at every verified row the token that it would have sampled when
# decoding. Drafts are not sampled; they are accepted while they equal the target's tokens.
#
# ## Acceptance by position
#
# An output of n tokens comes from a verify step that accepted n - 1 drafts and added the target's own next token. The
# first output of a request comes from the prompt, and the last one may be cut at `max_new_tokens`; both are left out.
# From the others follows the share of verify steps that accepted the draft at depth d (and so all drafts before it).

# %%
texts = [
    "This program is free software",
    "Permission is hereby granted",
    "Redistribution and use in source",
    "The software is provided as is",
    "Licensed under the terms of the",
    "You may copy and distribute it",
    "In no event shall the authors",
    "A copy of this license must be",
]
prompts = [[256, *text.encode()] for text in texts]

accepted, reached, length = {}, {}, {}
for name, kind in speculative.items():
    outputs = serve([(tokens, params(kind)) for tokens in prompts])
    accepted[name] = np.array([len(piece) - 1 for pieces in outputs for piece in pieces[1:-1]])
    reached[name] = [(accepted[name] >= d).mean() for d in range(1, kind.depth + 1)]
    length[name] = 1 + accepted[name].mean()
    a, depth = reached[name][0], kind.depth
    shares = ", ".join(f"{share:.2f}" for share in reached[name])
    print(f"{name:12} accepted at depth 1, 2, ...: {shares} ({len(accepted[name])} verify steps)")
    print(f"{'':12} {length[name]:.2f} tokens a step; from depth 1 alone {(1 - a ** (depth + 1)) / (1 - a):.2f}")

# %%
figure, axis = plt.subplots(figsize=(6, 4))
for (name, shares), marker, color in zip(reached.items(), "os", ("C0", "C1"), strict=True):
    depths = np.arange(1, len(shares) + 1)
    axis.plot(depths, shares, marker + "-", color=color, label=name)
    axis.plot(depths, shares[0] ** depths, "--", color=color, alpha=0.5)
axis.plot([], [], "--", color="0.6", label="$a^d$, $a$ from depth 1")
axis.set(xlabel="depth d of the draft", ylabel="share of verify steps that accept it", xticks=[1, 2, 3], ylim=(0, 1))
axis.set_title("Acceptance by position, greedy, deepseek-v3-tiny")
axis.legend(loc="lower left")
figure.tight_layout()
plt.show()

# %% [markdown]
# If every draft were accepted with the same probability a, independently of the others, the share at depth d would be
# a^d and a step would give (1 - a^(K+1)) / (1 - a) tokens (arXiv:2211.17192, equation 1). The solid lines are below the
# dashed ones, because past depth 1 the MTP layer continues from its own hidden state instead of the target's. The tree
# starts higher, because it has three candidates at its first level instead of one (for trees see arXiv:2305.09781). It
# is one level shorter, so no step gives more than three tokens.
#
# ## Other drafters
#
# For a model without an MTP layer, drafts can come from another checkpoint with the same vocabulary, which has a cache
# of its own, or from the request's text: the tokens that followed its last three tokens where these occurred before.
# Such n-grams need no pass of a model. The same prompts are served with a chain of three drafts from each; the tokens
# stay the same. How good n-grams are depends on how much the text repeats itself.

# %%
other = load_checkpoint(here.parent / "tests" / "fixtures" / "deepseek-v2-lite-tiny", dtype=jnp.float32)
same = serve([(tokens, params(chain)) for tokens in prompts])
tokens_per_step = {"MTP layer": length["chain 1x1x1"]}
for name, draft in {"other checkpoint": DraftModel(other), "3-grams": NgramDrafts(3)}.items():
    made = generate(model, prompts, max_new_tokens=NEW, num_drafts=3, draft=draft, page_size=16)
    assert made.tokens == [list(itertools.chain(*pieces)) for pieces in same]
    tokens_per_step[name] = made.statistics.acceptance_length
figure, axis = plt.subplots(figsize=(6, 2))
axis.bar_label(axis.barh(list(tokens_per_step), list(tokens_per_step.values())), fmt="%.2f", padding=2)
axis.set(xlabel="tokens per verify step, chain of three drafts", xlim=(0, 4))
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What a round costs
#
# A round drafts, verifies, and runs the accepted tokens through the draft layer. The expected speed-up of decoding is
# the tokens per round divided by the cost of a round, which is its time in plain decode steps. The measured speed-up is
# that of whole requests, from `add_request` to the last token, including the prompt. Requests run one at a time here,
# the kinds in turn, so that other work on the machine affects all of them alike.
#
# A step of the engine launches one round and returns the tokens of the previous round, which may finish at any time
# during the step. So the time of a round is computed as a request's time divided by its rounds; the median of repeats
# is shown.


# %%
def timed(tokens, kind):
    """Seconds of one request, and the mean seconds of its rounds after the prompt."""
    engine.add_request(tokens, params(kind))
    clock, counts = [time.perf_counter()], []
    while engine.busy:
        counts.append(sum(len(output.tokens) for output in engine.step()))
        clock.append(time.perf_counter())
    # The first step launches the prompt and a round, and the second returns both; each later step returns a round. When
    # the last token is returned, another round may still be running.
    last = max(step for step, count in enumerate(counts) if count)
    return clock[last + 1] - clock[0], (clock[last + 1] - clock[2]) / (last - 1)


REPEATS = 3
times = {name: np.empty((REPEATS, len(prompts), 2)) for name in kinds}
for repeat, (number, tokens) in itertools.product(range(REPEATS), enumerate(prompts)):
    for name, kind in kinds.items():
        times[name][repeat, number] = timed(tokens, kind)

whole, per_round = {}, {}
for name in kinds:
    whole[name], per_round[name] = np.median(times[name], axis=0).mean(axis=0)
length["off"] = 1.0
cost = {name: per_round[name] / per_round["off"] for name in kinds}
expected = {name: length[name] / cost[name] for name in kinds}
measured = {name: whole["off"] / whole[name] for name in kinds}
print(f"{'':12} round, ms  cost  tokens/round  expected  tokens/s  measured")
for name in kinds:
    print(
        f"{name:12} {1e3 * per_round[name]:9.2f}  {cost[name]:.2f}  {length[name]:12.2f}  {expected[name]:8.2f}  "
        f"{NEW / whole[name]:8.0f}  {measured[name]:8.2f}"
    )
print("compiled after warm-up:", engine.statistics.compiles_after_warm_up)

# %%
figure, axis = plt.subplots(figsize=(6, 4))
places = np.arange(len(speculative))
for offset, (label, values) in zip((-0.2, 0.2), {"expected": expected, "measured": measured}.items(), strict=True):
    bars = axis.bar(places + offset, [values[name] for name in speculative], width=0.38, label=label)
    axis.bar_label(bars, fmt="%.2f", padding=2)
axis.axhline(1, color="0.4", linestyle="--", label="no speculation")
axis.set(ylabel="tokens/s relative to no speculation", xticks=places, xticklabels=list(speculative))
axis.set_ylim(0, 1.4 * max(1, *expected.values(), *measured.values()))
axis.set_title("Speed-up at batch 1, deepseek-v3-tiny on a CPU")
axis.legend(loc="upper right")
figure.tight_layout()
plt.show()

# %% [markdown]
# Speculation is faster if a round gives more tokens than its cost in decode steps. A tiny model on a CPU gains little
# or loses: a pass of the MTP layer costs nearly as much as a decode step, because the model has three layers
# (DeepSeek-V3 has sixty-one) and every program has a fixed cost. The rows of drafts also add to the cost of verifying;
# they are nearly free only if a decode step is bound by reading the weights. The measured speed-up also includes the
# prompt's passes and the tokens that are cut at the end of a request.
#
# For DeepSeek-V3 itself, one MTP draft is reported to be accepted in 85 to 90 % of the cases and to give 1.8 times the
# tokens per second (arXiv:2412.19437, section 5.4.3).
