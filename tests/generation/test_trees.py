"""Generation with draft trees on the V3 fixture: greedy's tokens, and more accepted than along a chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import V3
from mla_attn import generation
from mla_attn.engine import Engine, launching
from mla_attn.models import load_checkpoint
from mla_attn.passes import DraftPasses, Passes, Shapes
from mla_attn.speculative import DraftTree
from recorder import programs_kept

TREES = [(2, 2), (3, 2), (4, 1, 1)]
PROMPTS = range(4)
ROOM = 76  # new tokens and drafts together: programs of different trees that can be shared then are


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        yield


@functools.cache
def model():
    return load_checkpoint(V3, dtype=jnp.float32)


@functools.cache
def expected():
    """Prompts, and the tokens after them, of the reference."""
    stored = np.load(V3 / "expected.npz")
    return [(stored[f"prompt_{i}"].tolist(), stored[f"greedy_{i}"].tolist()) for i in PROMPTS]


@functools.cache
def run(widths):
    """A whole generation; before each verify step, a chain as deep as the tree is drafted from the same state.

    Returns:
        The tokens, and of each step and request that was active: the request, its number of tokens before the step,
        how many it got, the tree's drafts, and those of a chain from each of the drafts after the anchor.
    """
    tree, steps = DraftTree(widths), []
    chain = DraftPasses(Passes(model(), shapes(tree)), model(), DraftTree((1,) * tree.depth))

    launch = launching.launch_tokens

    def launch_tokens(engine, kind, requests):
        slots, states = np.array([r.slot for r in requests]), jax.tree.map(np.array, engine._device[1])
        lens, counts = states["lens"][slots], [r.num_new for r in requests]
        chains = np.stack([chain_drafts(engine, chain, requests, states, n) for n in range(widths[0])], axis=1)
        launch(engine, kind, requests)
        emitted = np.array(engine._device[1]["lens"])[slots] - lens
        for row, request in enumerate(requests):
            steps.append((request.id, counts[row], int(emitted[row]), engine.drafts[row], chains[row]))

    class Watched(Engine):
        def _run(self, bucket, **arrays):
            if bucket.name == "target_verify":
                self.drafts = np.array(self._device[1]["drafts"])[np.asarray(arrays["slots"])]
            return super()._run(bucket, **arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "Engine", Watched)
        patch.setattr(launching, "launch_tokens", launch_tokens)
        new = ROOM - (tree.size - 1)
        prompts = [prompt for prompt, _ in expected()]
        made = generation.generate(model(), prompts, max_new_tokens=new, tree=tree, page_size=16, ignore_eos=True)
    return made.tokens, steps


def shapes(tree):
    longest = max(len(prompt) for prompt, _ in expected()) + ROOM
    return Shapes(batches=(4,), prompt_rows=(8,), table_width=-(-longest // 16), page_size=16, max_len=longest)


def chain_drafts(engine, chain, requests, states, first):
    """What a chain would draft after one of the draft layer's likeliest tokens, on a copy of the cache."""
    slots, depth = np.array([r.slot for r in requests]), chain.tree.depth
    drafts = np.full((len(slots), depth), -1, np.int32)
    drafts[:, 0] = states["drafts"][slots, first]
    for request in requests:  # the chain's rows are those of the round that follows
        pages, length = engine._scheduler.pages, engine._scheduler.most_rows(request.prompt_len, request.params)
        pages.grow(request.id, max(pages.length(request.id), length))
    fixed = {"page_table": engine._scheduler.pages.table([r.id for r in requests]), "lens": states["lens"][slots]}
    fixed |= {"active": np.ones(len(slots), np.int32)}
    draft = {"drafts": drafts, "hidden": states["hidden"][slots, :1]}
    pools = jax.tree.map(jnp.copy, engine._device[0])
    for step, bucket in enumerate(chain.draft_decode):
        number = {"step": np.int32(step), "num_drafted": np.int32(step)}
        out, pools = bucket(engine._passes.state, pools, {**draft, **number, **fixed})
        draft = {name: np.array(value)[: len(slots)] for name, value in out.items()}
    return draft["drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("widths", TREES)
def test_tokens_are_those_of_greedy(widths):
    tokens, _ = run(widths)
    for mine, (_, greedy) in zip(tokens, expected(), strict=True):
        count = min(len(mine), len(greedy))
        assert count >= 64
        assert mine[:count] == greedy[:count]


@pytest.mark.slow
@pytest.mark.parametrize("widths", TREES)
def test_a_tree_accepts_at_least_as_many_as_a_chain(widths, capsys):
    """From the same committed prefix, at every step of every request; and more, all together."""
    tokens, steps = run(widths)
    depth, accepted = len(widths), []
    for request, count, emitted, _, chains in steps:
        following = tokens[request][count : count + depth]
        if len(following) == depth:  # the target's own tokens are the text, which says what a chain would get
            right = np.cumprod(chains[0] == following).sum()
            accepted.append((emitted - 1, right))
    along_tree, along_chain = np.transpose(accepted)
    assert len(accepted) > 80
    assert (along_tree >= along_chain).all() and along_tree.sum() > along_chain.sum()
    assert along_tree.max() == along_chain.max() == depth and along_tree.min() == along_chain.min() == 0
    with capsys.disabled():
        means = f"{along_tree.mean():.2f} drafts accepted a step, {along_chain.mean():.2f} along a chain"
        print(f"\ntree {'x'.join(map(str, widths))}: {means}, {len(accepted)} steps")


@pytest.mark.slow
@pytest.mark.parametrize("widths", TREES)
def test_branches_do_not_see_each_other(widths):
    """Every branch holds the drafts of a chain that begins as it does."""
    tree, (_, steps) = DraftTree(widths), run(widths)
    for _, _, _, drafts, chains in steps:
        assert len(set(drafts[: widths[0]])) == widths[0]
        for first in range(widths[0]):
            row, branch = first + 1, [drafts[first]]
            while (tree.parents == row).any():
                row = int(np.argmax(tree.parents == row))
                branch.append(drafts[row - 1])
            assert branch == chains[first].tolist()
