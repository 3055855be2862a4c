"""The adapter to sglang-jax, with a stand-in of the engine's few functions that it replaces, and with the engine."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from integrations import ragged
from mla_attn.dispatch import Device, compiling_for
from mla_attn.integrations import sglang_jax
from mla_attn.integrations.sglang_metadata import step_metadata
from mla_attn.metadata import AttentionMetadata

SCALE = 0.3


def mla_ragged_paged_attention(
    ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution, *,
    sm_scale=1.0, sliding_window=None, soft_cap=None, q_scale=None, k_scale=None, v_scale=None, decode_batch_size=1,
):  # fmt: skip
    raise AssertionError("a kernel for TPUs")


def ragged_paged_attention(
    queries, keys, values, kv_cache_fused, kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution, custom_mask,
    attention_sink=None, *, causal=1, sm_scale=1.0, sliding_window=None, soft_cap=None, q_scale=None, k_scale=None,
    v_scale=None, xai_temperature_len=None, softmax_dtype=None, m_block_sizes=None, mask_aligned_to_cu_kv=False,
):  # fmt: skip
    raise AssertionError("a kernel for TPUs")


def gmm(
    lhs, rhs, group_sizes, preferred_element_type=jnp.float32, rhs_scale=None, rhs_bias=None, tiling=None,
    group_offset=None, existing_out=None, zero_initialize=True, activation_quantized_dtype=None,
):  # fmt: skip
    return "the engine's own"


class Backend:
    """What both backends of the engine do: metadata from lists; a call, over a mesh, of what their module imports."""

    def __init__(self, mesh, module, **dims):
        self.mesh, self.module = mesh, module
        vars(self).update(dims)

    def get_forward_metadata(self, batch):
        return types.SimpleNamespace(**{name: jnp.asarray(x) for name, x in batch.lists.items()})

    @staticmethod
    def get_max_running_reqests(max_context_len, page_size):
        return 2

    def __call__(self, metadata, cache, *rows, **options):
        kernel, extra = (
            (self.module.mla_ragged_paged_attention, ())
            if len(rows) == 4
            else (self.module.ragged_paged_attention_v3, (None, None))
        )
        lists = metadata.seq_lens, metadata.page_indices, metadata.cu_q_lens, metadata.cu_kv_lens, metadata.distribution
        heads = P("data", "tensor") if len(rows) == 3 else None
        specs = [heads] * 3 if heads else [P("data", "tensor"), P("data", "tensor"), P("data"), P("data")]
        cache_spec = P("data", None, "tensor") if heads else P("data")
        call = jax.shard_map(
            lambda *args: kernel(*args, *extra, **options),
            mesh=self.mesh,
            in_specs=(*specs, cache_spec, *[P("data")] * 5),
            out_specs=(P("data", "tensor"), cache_spec),
            check_vma=False,
        )
        placed = [
            jax.device_put(x, jax.NamedSharding(self.mesh, spec))
            for x, spec in zip((*rows, cache), (*specs, cache_spec), strict=True)
        ]
        return self.run(jax.jit(call), *placed, *lists)

    @staticmethod
    def run(program, *arguments):
        return program(*arguments)


class ModelRunner:
    """Chooses a backend by the device, as the engine does."""

    def __init__(self, backend, cache):
        self.server_args = types.SimpleNamespace(device="cpu", attention_backend="fa")
        self.model_config = types.SimpleNamespace(context_len=200)
        self.token_to_kv_pool, self.dtype = types.SimpleNamespace(kv_buffer=[cache]), jnp.float32
        self.made = backend

    def _get_attention_backend(self):
        return "native" if self.server_args.device == "cpu" else self.made


@pytest.fixture
def engine(monkeypatch):
    """Modules as those of the engine, by the last parts of their names."""
    contents = {
        "sgl_jax.version": {"__version__": "0.0.0.dev0"},
        "sgl_jax.srt.layers.moe": {"gmm": gmm},
        "sgl_jax.srt.model_executor.model_runner": {
            "ModelRunner": type("ModelRunner", (ModelRunner,), dict(vars(ModelRunner)))
        },
        "sgl_jax.srt.layers.attention.mla_backend": {"mla_ragged_paged_attention": mla_ragged_paged_attention},
        "sgl_jax.srt.layers.attention.flashattention_backend": {"ragged_paged_attention_v3": ragged_paged_attention},
    }
    made = {}
    for name, names in contents.items():
        made[name.rpartition(".")[2]] = module = types.ModuleType(name)
        vars(module).update(names)
        for end in range(1, name.count(".") + 1):
            monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:end]), types.ModuleType("package"))
    for name in contents:
        monkeypatch.setitem(sys.modules, name, made[name.rpartition(".")[2]])

    class MLAAttentionBackend(Backend):
        def __init__(self, mesh, module, page_size=1, vmem_limit_bytes=None, **dims):
            assert page_size > 1 and vmem_limit_bytes is not None, "asks for a TPU"
            super().__init__(mesh, module, page_size=page_size, **dims)

        def get_forward_metadata(self, batch):
            return super().get_forward_metadata(batch)

        @staticmethod
        def get_max_running_reqests(max_context_len, page_size):
            return 2

    made["mla_backend"].MLAAttentionBackend = MLAAttentionBackend
    made["flashattention_backend"].FlashAttention = type("FlashAttention", (Backend,), dict(vars(Backend)))
    return types.SimpleNamespace(**made)


def test_install_twice(engine):
    assert sglang_jax.install() == list(sglang_jax._REPLACEMENTS)
    functions = engine.mla_backend.mla_ragged_paged_attention, engine.moe.gmm
    assert sglang_jax.install() == []
    assert functions == (engine.mla_backend.mla_ragged_paged_attention, engine.moe.gmm)
    for backend in (engine.mla_backend.MLAAttentionBackend, engine.flashattention_backend.FlashAttention):
        assert backend.get_max_running_reqests(1000, 1) == sglang_jax.MOST_REQUESTS


def test_names_that_moved(engine):
    del engine.moe.gmm
    with pytest.raises(RuntimeError, match=r"0.0.0.dev0 has no sgl_jax.srt.layers.moe:gmm; tested with .*cddbf6f"):
        sglang_jax.install()
    assert engine.mla_backend.mla_ragged_paged_attention is mla_ragged_paged_attention, "half of it is replaced"
    engine.moe.gmm = lambda lhs, rhs, sizes: None
    with pytest.raises(RuntimeError, match=r"has no argument 'group_sizes' of sgl_jax.srt.layers.moe:gmm"):
        sglang_jax.install()
    sys.modules["sgl_jax.srt.layers.moe"] = None
    with pytest.raises(RuntimeError, match=r"has no sgl_jax.srt.layers.moe:gmm"):
        sglang_jax.install()


def test_without_the_engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_jax", None)
    with pytest.raises(ImportError):
        sglang_jax.install()


def mesh_of(data, tensor):
    axes = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=axes)


RANKS = [([(9, 1), (3, 3), (0, 1)], 2), ([(8, 2), (12, 1), (6, 3)], 1)]  # each request, and the rows of padding


def sharded_batch(kind, mesh, **sizes):
    """A batch on each data rank of the mesh, and all of them as the engine has them."""
    ranks = [
        ragged.make(kind, requests, **sizes, dtype=jnp.float32, packed=True, extra_rows=extra, seed=seed)
        for seed, (requests, extra) in enumerate(RANKS[: mesh.shape["data"]])
    ]
    pages, entries = (max(len(of(rank)) for rank in ranks) for of in (lambda r: r.cache, lambda r: r.arrays["pages"]))
    for rank in ranks:
        rank.arrays["pages"] = np.resize(rank.arrays["pages"], entries)
        for name in ("cache", "stored"):
            array = getattr(rank, name)
            padding = np.full((pages - len(array), *array.shape[1:]), np.nan, array.dtype)
            setattr(rank, name, np.concatenate([array, padding]))

    def joined(of, spec):
        return jax.device_put(np.concatenate([of(rank) for rank in ranks]), jax.NamedSharding(mesh, spec))

    names = {"kv_lens": "seq_lens", "pages": "page_indices"}
    lists = {names.get(name, name): joined(lambda r, name=name: r.arrays[name], P("data")) for name in ranks[0].arrays}
    rows = [joined(lambda r, i=i: (*r.queries, *r.new)[i], P("data")) for i in range(4 if kind == "mla" else 3)]
    batch = types.SimpleNamespace(
        lists=lists, dp_size=len(ranks), input_ids=np.zeros(len(rows[0])), spec_algorithm=None
    )
    return ranks, batch, joined(lambda r: r.cache, P("data")), rows


def backend_of(engine, kind, mesh, page_size):
    if kind == "gqa":
        dims = {"num_heads": ragged.HEADS, "head_dim": ragged.HEAD_DIM, "page_size": page_size}
        return engine.flashattention_backend.FlashAttention(mesh, engine.flashattention_backend, **dims)
    dims = {"kv_lora_rank": ragged.RANK, "qk_rope_head_dim": ragged.ROPE, "num_heads": ragged.HEADS}
    return engine.mla_backend.MLAAttentionBackend(mesh, engine.mla_backend, page_size=page_size, **dims)


@pytest.mark.parametrize(("kind", "sizes"), [
    ("mla", {"page_size": 4, "pack": 2}),
    ("mla", {"page_size": 1, "pack": 2, "page_rows": 2}),
    ("gqa", {"page_size": 4, "pack": 1}),
], ids=["mla", "mla, pages of 1", "gqa"])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["two data ranks", "two tensor ranks"])
def test_a_step(engine, kind, sizes, shape):
    """Through the engine's hooks: metadata once, in the place of the list of pages, then the layer's call."""
    sglang_jax.install()
    mesh = mesh_of(*shape)
    ranks, batch, cache, rows = sharded_batch(kind, mesh, **sizes)
    backend = backend_of(engine, kind, mesh, sizes["page_size"])
    runner = engine.model_runner.ModelRunner(backend, cache)
    assert runner._get_attention_backend() is backend and runner.server_args.device == "cpu"
    metadata = backend.get_forward_metadata(batch)
    assert isinstance(metadata.page_indices, AttentionMetadata)
    with jax.set_mesh(mesh):
        out, stored = backend(metadata, cache, *rows, sm_scale=SCALE)
    results = (np.split(np.asarray(x), len(ranks)) for x in (out, stored))
    for rank, one, pages in zip(ranks, *results, strict=True):
        ragged.check(one, *rank.expected(scale=SCALE), jnp.float32)
        ragged.check_cache(pages, rank)


def refused(*args, **kwargs):
    raise AssertionError("a layer makes a work list of its own")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="kernels refuse an older jax")
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_kernels_share_a_work_list(engine, kind, monkeypatch):
    """That of the step's metadata; traced for a GPU, as there is none."""
    sglang_jax.install()
    mesh, dims = mesh_of(1, 1), {"num_heads": 16, "page_size": 16}
    kernels = importlib.import_module(f"mla_attn.mosaic_gpu.{kind}")
    if kind == "mla":
        dims |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
        backend = engine.mla_backend.MLAAttentionBackend(mesh, engine.mla_backend, **dims)
        rows, cache = [(6, 16, 512), (6, 16, 64), (6, 512), (6, 64)], (8, 8, 2, 640)
    else:
        backend = engine.flashattention_backend.FlashAttention(mesh, engine.flashattention_backend, **dims, head_dim=64)
        rows, cache = [(6, 16, 64), (6, 4, 64), (6, 4, 64)], (8, 16, 4, 2, 128)
    rows, cache = [jnp.zeros(shape, jnp.bfloat16) for shape in rows], jnp.zeros(cache, jnp.bfloat16)
    runner = engine.model_runner.ModelRunner(backend, cache)
    runner.dtype = jnp.bfloat16
    runner._get_attention_backend()
    lists = {"seq_lens": [20, 5], "page_indices": [3, 1, 2, 0], "cu_q_lens": [0, 1, 5], "cu_kv_lens": [0, 32, 48]}
    over = jax.NamedSharding(mesh, P("data"))
    lists = {
        name: jax.device_put(np.array(x, np.int32), over) for name, x in {**lists, "distribution": [0, 0, 2]}.items()
    }
    batch = types.SimpleNamespace(lists=lists, dp_size=1, input_ids=np.zeros(6), spec_algorithm=None)
    with compiling_for(Device("gpu", "9.0", 132)):
        metadata = backend.get_forward_metadata(batch)
        assert metadata.page_indices.work.size > 0
        monkeypatch.setattr(kernels, {"mla": "work_list", "gqa": "even_list"}[kind], refused)
        backend.run = jax.eval_shape
        with jax.set_mesh(mesh):
            out, _ = backend(metadata, cache, *rows, sm_scale=SCALE)
    assert out.shape == rows[0].shape


def test_drafts_keep_the_lists(engine):
    """Programs for drafts change them, so the function makes its own metadata from them."""
    sglang_jax.install()
    mesh = mesh_of(1, 1)
    (rank,), batch, cache, rows = sharded_batch("gqa", mesh, page_size=4, pack=2)
    backend = backend_of(engine, "gqa", mesh, 4)
    runner = engine.model_runner.ModelRunner(backend, cache)
    runner._get_attention_backend()
    batch.spec_algorithm = types.SimpleNamespace(is_none=lambda: False)
    metadata = backend.get_forward_metadata(batch)
    assert metadata.page_indices.ndim == 1
    with jax.set_mesh(mesh):
        out, _ = backend(metadata, cache, *rows, sm_scale=SCALE, sliding_window=7)
    ragged.check(out, *rank.expected(scale=SCALE, window=7), jnp.float32)
    call = engine.flashattention_backend.ragged_paged_attention_v3
    arguments = (*rows, cache, *[None] * 5)
    with pytest.raises(NotImplementedError, match="a tree of drafts with a window of 7"):
        call(*arguments, np.zeros(3), sliding_window=7)
    with pytest.raises(NotImplementedError, match="xai_temperature_len=3"):
        call(*arguments, None, xai_temperature_len=3)
    planned = step_metadata(backend, runner, batch, metadata, metadata.page_indices)
    with pytest.raises(NotImplementedError, match="causal=0 in a step without drafts"):
        call(*rows, cache, None, planned, None, None, None, None, causal=0)


@pytest.mark.parametrize("aligned", [True, False])
def test_trees_of_drafts(engine, aligned):
    """Each request has as many drafts; its mask has a row of all its keys, or of those of its pages, for each."""
    sglang_jax.install()
    parents, sizes = [None, 0, 0, 1], {"page_size": 4, "pack": 1, "dtype": jnp.float32, "packed": True}
    batch = ragged.make("gqa", [(9, 4), (6, 4), (0, 4), (13, 4)], **sizes, extra_rows=0)
    ancestors = np.eye(4, dtype=bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            ancestors[node] |= ancestors[parent]
    kv_lens, lists = batch.arrays["kv_lens"], batch.arrays
    widths = np.diff(lists["cu_kv_lens"]) if aligned else kv_lens
    rows = [np.zeros((4, width), np.int32) for width in widths]
    for row, length in zip(rows, kv_lens, strict=True):
        row[:, : max(length - 4, 0)] = 1
        row[:, length - 4 : length] = ancestors if length else 0
    mask = np.concatenate([row.reshape(-1) for row in rows] + [np.ones(5, np.int32)])
    arrays = lists["kv_lens"], lists["pages"], lists["cu_q_lens"], lists["cu_kv_lens"], lists["distribution"], mask
    function = engine.flashattention_backend.ragged_paged_attention_v3
    arrays = map(jnp.asarray, (*batch.queries, *batch.new, batch.cache, *arrays))
    out, cache = function(*arrays, causal=0, sm_scale=SCALE, mask_aligned_to_cu_kv=aligned)

    def visible(b, at, p):
        first = kv_lens[b] - 4
        return p < first or ancestors[at - first, p - first]

    ragged.check(out, *batch.expected(scale=SCALE, mask=visible), jnp.float32)
    ragged.check_cache(cache, batch)


def test_experts(engine):
    sglang_jax.install()
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((9, 6), (2, 6, 5)))
    sizes, owner = jnp.array([2, 3, 4]), np.repeat([-1, 0, 1], [2, 3, 4])
    expected = np.where(owner[:, None] < 0, 0, np.einsum("mk,mkn->mn", lhs, np.asarray(rhs)[owner]))
    out = engine.moe.gmm(
        lhs=lhs, rhs=rhs, group_sizes=sizes, group_offset=jnp.array([1]), existing_out=jnp.ones((9, 5))
    )
    np.testing.assert_allclose(out, expected + 1, atol=1e-5)
    assert engine.moe.gmm(lhs, rhs, sizes, rhs_scale=jnp.ones(3)) == "the engine's own"


def test_engines_are_not_imported():
    """At the top of a module; only inside functions."""
    for module in Path(sglang_jax.__file__).parent.glob("*.py"):
        for line in module.read_text().splitlines():
            assert not line.startswith(("import sgl_jax", "from sgl_jax", "import ejkernel", "from ejkernel"))
        assert len(module.read_text().splitlines()) < 250


needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("sgl_jax") is None, reason="needs sglang-jax of 2026-08 (mla_attn/integrations/README.md)"
)


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_size", "options"), [
    *(("deepseek-v3-tiny", page_size, {}) for page_size in (1, 16, 64)),
    *(("qwen3-tiny", page_size, {}) for page_size in (1, 16, 64)),
    ("gemma2-tiny", 16, {}),
    ("deepseek-v3-tiny", 16, {"tp_size": 4, "dp_size": 2}),
    ("qwen3-tiny", 16, {"tp_size": 4, "dp_size": 2}),
])  # fmt: skip
def test_tokens(name, page_size, options):
    """Three prompts at once, in parts; asked again, their prefixes are found."""
    folder = Path(__file__).parents[1]
    program, checkpoint = folder / "lib" / "sglang_tokens.py", folder / "fixtures" / name
    found = subprocess.run(
        [sys.executable, program, checkpoint, str(page_size), json.dumps(options)],
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={options.get('tp_size', 1)}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]  # fmt: skip
    expected = np.load(checkpoint / "expected.npz")
    for again, outputs in enumerate(json.loads(found)):
        for i, (tokens, cached) in enumerate(outputs):
            assert tokens == expected[f"greedy_{i}"][: len(tokens)].tolist()
            assert cached == again * ((len(expected[f"prompt_{i}"]) - 1) // page_size * page_size)
