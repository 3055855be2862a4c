"""Small step functions over a folder: cold, warm, and with whatever may lie there."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.buckets import Buckets
from mla_attn.cache import LatentPool
from mla_attn.dispatch import compiling_for
from mla_attn.programs import Folder, Step, folder, naming, open_folder
from mla_attn.specs import MLASpec
from mla_attn.support import A100
from source_tree import ROOT

SPEC = MLASpec(num_heads=2, kv_lora_rank=8, qk_rope_head_dim=8, scale=0.3)
POOL = LatentPool.create(num_layers=2, num_pages=3, page_size=4, spec=SPEC, dtype=jnp.float32)
RUNGS = [{"rows": jax.ShapeDtypeStruct((n, 16), jnp.float32)} for n in (1, 2)]


class Written:
    """Buckets of a step that writes its rows into a pool, and the calls of the function: it is traced for each."""

    def __init__(self, kept, *, by=1, facts=("written", 1)):
        self.folder, self.traced = kept, 0

        def fn(state, pool, inputs):
            self.traced += 1
            pages = pool.data.at[0, : inputs["rows"].shape[0]].set(by * inputs["rows"] + state[0])
            return {"sum": pages.sum(), "both": (pages[0], [state[1]])}, LatentPool(pages, 2, 3, 8, 1, 3)

        self.buckets = Buckets("written", Step(fn, "written", facts), RUNGS, kept)

    def run(self):
        """Both programs, judged by their results."""
        for rows in (1, 2):
            pool = jax.tree.map(jnp.array, POOL)
            given = np.arange(16 * rows, dtype=np.float32).reshape(rows, 16)
            out, after = self.buckets((jnp.float32(2), jnp.ones(3)), pool, {"rows": given})
            assert pool.data.is_deleted()
            np.testing.assert_array_equal(after.data[0, :rows], given + 2)
            assert out["sum"] == (given + 2).sum() and out["both"][1][0].shape == (3,)
        return self


@pytest.fixture
def kept(tmp_path):
    """A folder with both programs."""
    Written(Folder(tmp_path / "programs")).run()
    return tmp_path / "programs"


def files(path):
    return sorted(path.glob("*.program"))


def told(caplog):
    """Warnings about the folder."""
    return [
        r.getMessage() for r in caplog.records if r.name.startswith("mla_attn.programs") and r.levelname == "WARNING"
    ]


def made(path, **options):
    """How many programs a process like the first one traces, reads and writes."""
    written = Written(Folder(path), **options).run()
    return written.traced, written.folder.read, written.folder.written


def test_cold_then_warm(tmp_path):
    path = tmp_path / "not" / "there"
    assert made(path) == (2, 0, 2)
    assert made(path) == (0, 2, 0)
    assert sorted(path.iterdir()) == files(path)  # nothing else is left
    assert path.stat().st_mode & 0o77 == 0


def test_an_equal_step_of_the_same_process_reads_nothing(kept):
    written = Written(Folder(kept)).run()
    again = Buckets("written", written.buckets._step, RUNGS, written.folder)
    again(*((jnp.float32(2), jnp.ones(3)), jax.tree.map(jnp.array, POOL), {"rows": np.ones((1, 16), np.float32)}))
    assert (written.traced, written.folder.read) == (0, 2)
    # Another folder gets what there is.
    elsewhere = Folder(kept / "elsewhere")
    Buckets("written", written.buckets._step, RUNGS, elsewhere).compile(0, (jnp.float32(2), jnp.ones(3)), POOL)
    assert (written.traced, elsewhere.written) == (0, 1)


def damage(data: bytes):
    yield "empty", b""
    yield "cut", data[:-1]
    yield "cut in the head", data[:20]
    yield "garbage", np.random.default_rng(0).bytes(len(data))
    yield "longer", data + b"\0"
    for place in (5, 25, len(data) // 2, len(data) - 1):
        yield f"a bit at {place}", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("number", range(9))
def test_a_damaged_file_is_made_anew(kept, number, caplog):
    file = files(kept)[0]
    whole = file.read_bytes()
    _, data = list(damage(whole))[number]
    file.write_bytes(data)
    assert made(kept) == (1, 1, 1)
    assert told(caplog) == [f"{file} is damaged, its program is lowered again"]
    assert made(kept) == (0, 2, 0)


def test_a_file_under_anothers_name_is_made_anew(kept):
    one, other = files(kept)
    one.write_bytes(other.read_bytes())
    assert made(kept) == (1, 1, 1)


@pytest.mark.parametrize("content", ["no program", "of other arguments"])
def test_a_foreign_file_is_made_anew(kept, content, tmp_path):
    """With a right head: somebody wrote it for this name."""
    one, other = files(kept)
    program = Folder(kept).load(other.stem) if content == "of other arguments" else b"\x10\0\0\0 no flatbuffer of ours"
    Folder(kept).store(one.stem, program)
    assert made(kept) == (1, 2, 1)
    assert made(kept) == (0, 2, 0)


def test_what_a_program_depends_on_is_in_its_name(kept, monkeypatch):
    """Another version, device, source or setting: nothing is found, and nothing wrong is computed."""
    with monkeypatch.context() as patch:
        patch.setattr(naming, "_versions", lambda: (("jax", "0.0.1"),))
        assert made(kept) == (2, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(naming, "_SOURCE", "of another day")
        assert made(kept) == (2, 0, 0)  # the files are not those that were imported: nothing is kept
    with compiling_for(A100):
        assert made(kept) == (2, 0, 2)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_of_another_process")  # read when a backend starts: only the name has it
        assert made(kept) == (2, 0, 2)
    with jax.default_matmul_precision("float32"):
        assert made(kept) == (2, 0, 2)
    assert made(kept, facts=("written", 2)) == (2, 0, 2)
    assert made(kept) == (0, 2, 0)


def test_what_has_no_name_is_not_kept(tmp_path):
    class Users:
        pass

    for facts in (None, (Users(),), (Users,), (lambda: tmp_path,)):
        assert made(tmp_path, facts=facts) == (2, 0, 0)


def test_what_jax_cannot_export_is_not_kept(tmp_path):
    def fn(state, pool, inputs):
        jax.debug.callback(lambda: None)
        return {}, pool + state

    buckets = Buckets("calls back", Step(fn, "calls_back", 1), [{}], Folder(tmp_path))
    _, pool = buckets(jnp.float32(1), jnp.zeros(2), {})
    assert pool.tolist() == [1, 1]
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_function_are_its_own(tmp_path):
    def fn(state, pool, inputs):
        raise NotImplementedError("no such thing")

    buckets = Buckets("raises", Step(fn, "raises", 1), [{}], Folder(tmp_path))
    with pytest.raises(NotImplementedError, match="no such thing"):
        buckets(jnp.float32(1), jnp.zeros(2), {})


@pytest.mark.parametrize("function", ["mkstemp", "replace", "mkdir"])
def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog, function):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    owner = {"mkstemp": folder.tempfile, "replace": folder.os, "mkdir": folder.pathlib.Path}[function]
    monkeypatch.setattr(owner, function, refuse)
    assert made(tmp_path) == (2, 0, 0)
    assert told(caplog) == ["programs are not kept: [Errno 13] Permission denied"]
    assert files(tmp_path) == []


def test_a_file_where_the_folder_should_be(tmp_path, caplog):
    (path := tmp_path / "file").write_text("")
    assert made(path) == (2, 0, 0)
    assert len(told(caplog)) == 3  # two that cannot be read, and one that nothing is kept


def test_two_processes_at_once(tmp_path):
    """Both compute rightly, and what they leave a third one finds: names are those of every process."""
    program = "import source_tree; source_tree.install()\nfrom programs import test_step\n"
    program += f"print(*test_step.made({str(tmp_path)!r}))"
    paths = os.pathsep.join(str(ROOT / "tests" / part) for part in ("", "lib"))
    options = {"env": os.environ | {"PYTHONPATH": paths}, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}

    def start():
        return subprocess.Popen([sys.executable, "-c", program], **options)

    def counts(process):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return tuple(map(int, out.split()))

    for traced, read, written in map(counts, [start(), start()]):
        assert traced + read == 2 and written <= traced
    assert sorted(tmp_path.iterdir()) == files(tmp_path)
    assert counts(start()) == (0, 2, 0)


def test_where_programs_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("MLA_ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_folder(None).path == tmp_path / "mla_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder(None).path == tmp_path / ".cache" / "mla_attn"
    monkeypatch.setenv("MLA_ATTN_CACHE_DIR", str(tmp_path / "named"))
    assert open_folder(None).path == tmp_path / "named"
    assert open_folder("~/mine").path == tmp_path / "mine"
    assert open_folder("") is None
    monkeypatch.setenv("MLA_ATTN_CACHE_DIR", "")
    assert open_folder(None) is None


def test_jax_keeps_its_own_where_it_was_told(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    assert before[names[0]] is not None
    try:
        open_folder(tmp_path)
        assert {name: getattr(jax.config, name) for name in names} == before
        jax.config.update(names[0], None)
        jax.config.update(names[1], 1.0)
        open_folder(tmp_path)
        assert jax.config.jax_compilation_cache_dir.startswith(f"{tmp_path}/xla/")
        assert jax.config.jax_persistent_cache_min_compile_time_secs < 1
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
