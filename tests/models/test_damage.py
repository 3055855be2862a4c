"""Damaged folders by the thousand: each is loaded rightly, or refused with the file, at once and in little memory."""

import collections
import os
import random
import resource
import shutil
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import damage
from checkpoints import read_checkpoint, write_checkpoint
from mla_attn.models import CheckpointError, DeepseekConfig, load_checkpoint
from mla_attn.models.loading import read_config
from mla_attn.models.tokenizer import load_tokenizer

pytest.importorskip("tokenizers", reason="an extra")
pytest.importorskip("tiktoken", reason="an extra")

MOST_SECONDS, MOST_BYTES = 2.0, 200 << 20  # of memory beyond the tensors, some kilobytes
PROMPT = "Hé, 漢 <bos>!"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = damage.write_folders(tmp_path_factory.mktemp("right"))
    return [(folder, load(folder), tokens(folder)) for folder in made]


def load(folder):
    return load_checkpoint(folder, dtype=jnp.float32)


def leaves(model):
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def tokens(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(PROMPT)
    assert isinstance(tokenizer.decode([*ids, 0, 257, 300]), str)
    return ids


def outcome(call, folder):
    """What a call returns, or None where it refuses; in little time and memory."""
    begin, high = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = call(folder)
    except CheckpointError as error:
        assert str(folder) in str(error) and str(error).isprintable() and len(str(error)) < 1500, error
        found = None
    assert time.process_time() - begin < MOST_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - high) << 10 < MOST_BYTES
    return found


def judge(folder, right, ids, work):
    """The closed list of outcomes: "right", where what was loaded is what the files say, or "refused"."""
    model, found = outcome(load, folder), outcome(tokens, folder)
    if model is not None:
        # Read by the test's own hands, and written anew without the damage.
        config, tensors = read_checkpoint(folder)
        made = {key: value for key, value in vars(DeepseekConfig.from_hf(config)).items() if key != "eos_token_ids"}
        assert made == {key: value for key, value in vars(model.config).items() if key != "eos_token_ids"}
        assert model.config.eos_token_ids == read_config(folder).eos_token_ids
        shutil.rmtree(work, ignore_errors=True)
        want = leaves(load(write_checkpoint(work, config, tensors)))
        got = leaves(model)
        assert got.keys() == want.keys() and all(got[path].tobytes() == want[path].tobytes() for path in want)
        differ = sum(got[path].tobytes() != leaf.tobytes() for path, leaf in leaves(right).items() if path in got)
        assert differ <= 6  # a tensor, or two that changed places; an embedding is three parameters
    return (
        "right" if model is not None else "refused",
        "right" if found == ids else "refused" if found is None else "other",
    )


def run(folders, tmp_path, seeds):
    seen, work = collections.Counter(), tmp_path / "again"
    for seed in seeds:
        rng = random.Random(seed)
        source, right, ids = folders[seed % len(folders)]
        folder = tmp_path / "damaged" / source.name
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(source, folder)
        what = damage.damage(folder, rng)
        signal.alarm(60)  # nothing may wait
        try:
            seen[judge(folder, right, ids, work)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}: {what}")
            raise
        finally:
            signal.alarm(0)
    return seen


def test_some_damaged_folders(folders, tmp_path):
    seen = run(folders, tmp_path, range(36))
    assert seen[("refused", "right")] > 5 and seen[("right", "right")] > 0


@pytest.mark.slow
def test_many_damaged_folders(folders, tmp_path):
    """300 of them, or as many as the environment says."""
    count = int(os.environ.get("MLA_ATTN_DAMAGED_FOLDERS", "300"))
    seen = run(folders, tmp_path, range(count))
    print(dict(seen))
    assert sum(seen.values()) == count
