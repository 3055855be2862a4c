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
# One engine serves plain and speculative requests together. This notebook shows that speculation does not change a
# token, how far drafts are accepted, and what a round of drafting and verifying costs against what it brings. It runs
# on a CPU; nearly all of the time goes into compiling.

# %%
import itertools
import pathlib
import time

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_attn.engine import Engine, SamplingParams
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree

# %% [markdown]
# `tests/fixtures/deepseek-v3-tiny` is a small trained model in the layout of DeepSeek-V3, its multi-token-prediction
# (MTP) layer included. That layer drafts, the model verifies. A request asks for one of the engine's draft trees, or
# for none; each tree adds programs to compile. The prefix cache is off so that repeated requests do equal work.

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
# Six requests for one prompt: greedy and at temperature 0.8, each without speculation, with a chain of three drafts and
# with a tree. The engine runs two at a time and admits the next one when one of them ends. Requests of different
# speculation share the cache and the steps; each kind has passes of its own.

# %%
NEW = 48
prompt = [256, *b"This program is free software"]


def serve(requests):
    """The outputs of each request, as lists of the tokens that came together."""
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
# At a temperature speculation keeps the distribution anyway (arXiv:2211.17192). Here it keeps the tokens: a draw is the
# largest of logit plus Gumbel noise, and the noise depends on the request's seed and the token's position only. The
# target draws at every verified row what it would have drawn there when decoding, and drafts, which are points and not
# draws, are accepted while they equal it.
#
# ## Acceptance by position
#
# An output of n tokens comes from a verify step that accepted n - 1 drafts and added the correction or bonus. The first
# output of a request is the prompt's and the last one may be cut at `max_new_tokens`; both are left out. The rest gives
# the share of verify steps in which the draft at depth d was accepted, and with it all before it.

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
# If every draft were accepted with the same probability a, whatever came before it, the share at depth d would be a^d
# and a step would bring (1 - a^(K+1)) / (1 - a) tokens (arXiv:2211.17192, equation 1). The solid lines fall below the
# dashed ones: past depth 1 the MTP layer works from its own hidden state instead of the target's. The tree starts
# higher, with three candidates at its first level instead of one, and has two after each at its second (for trees see
# arXiv:2305.09781). It is one level shorter, so no step brings more than three tokens.
#
# ## What a round costs
#
# A round is drafting, verifying and bringing the draft layer's cache up to date. The expected speed-up of decoding is
# tokens per round over the cost of a round, in plain decode steps. The measured one is of whole requests, from
# `add_request` to the last token, the prompt included. Requests run one at a time here, kinds in turn so that other
# work on the machine hits all of them alike.
#
# A step of the engine launches one round and returns the tokens of the round before, which may end early or late within
# it. So a round's time is a request's time over its rounds, not that of a single step; of repeats the median counts.


# %%
def timed(tokens, kind):
    """Seconds of one request: of all of it, and of one round, those after the prompt on average."""
    engine.add_request(tokens, params(kind))
    clock, counts = [time.perf_counter()], []
    while engine.busy:
        counts.append(sum(len(output.tokens) for output in engine.step()))
        clock.append(time.perf_counter())
    # The first step launches the prompt and a round and the second returns both; each one after returns a round. When
    # the last token comes, a round that nobody needs may be under way.
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
# The cost of a round is its break-even: speculation gains where a round brings more tokens than that. A tiny model on a
# CPU gains little or loses. A pass of the MTP layer costs nearly as much as a decode step: it is one layer beside
# three, not beside sixty-one, and every program has its fixed cost. And the rows of drafts add to the cost of
# verifying; they are nearly free only where reading the weights bounds a decode step. The measured ratio also holds the
# prompt's passes and what is cut at the end of a request.
#
# DeepSeek-V3 itself reports 1.8 times the tokens/s from one MTP draft, accepted in 85 to 90 % of the cases
# (arXiv:2412.19437, section 5.4.3).
