"""Settings of every test: platform, JAX's strictest modes, shape checks."""

import gc
import os
import pathlib

import jax
import jaxtyping
import pytest

import selections
import source_tree

HELPERS = ("cases.paged", "checkpoints", "footprint", "helpers", "oracle", "ops.contract", "ops.ragged_base", "ranks")
pytest.register_assert_rewrite(*HELPERS)
SHAPES_CHECKED = source_tree.install()
MANY_MAPS = 20_000
# XLA for CPUs makes code of a fusion by MLIR, at length; it still has the shorter way of before.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def compile_quickly():
    """Have XLA make code quickly, which takes a third of the time; tests that promise bits say otherwise.

    Memory, copies and what a program computes are settled before code is made. `XLA_FLAGS` may ask for more.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_COMPILES}"  # read when a backend starts, in child processes too


def keep_compiled_programs():
    """Share compiled programs between test processes and runs, the small ones too, until `make clean`.

    What tests ask of a program (its memory, its text, how many were asked for) is the same of one that is read back.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = str(source_tree.ROOT / ".pytest_cache" / "jax")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        # For processes that tests start.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def pytest_configure(config):
    os.environ["MLA_ATTN_CACHE_DIR"] = ""  # what one test lowers, no other finds; processes that tests start too
    # On a GPU machine too, tests run on the CPU unless asked otherwise: most tolerances are those of the CPU.
    # JAX_PLATFORMS=cuda,cpu runs everything on the GPU; `-m gpu` leaves the choice to JAX.
    mark = config.getoption("markexpr")
    if not ("gpu" in mark and "not gpu" not in mark):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for processes that tests start
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    elif "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else the first process takes most of the GPU
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        compile_quickly()
        keep_compiled_programs()
    # Eight CPU devices, so that sharding can be tested everywhere.
    jax.config.update("jax_num_cpu_devices", 8)
    # Broadcasting between ranks hides missing axes; implicit promotion hides float32 copies of bfloat16 arrays.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_finish():
    # What imports and collection made stays: the collector need not look at it again and again (a twelfth of the time).
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)  # traces make and drop objects by the million, nearly none of them in cycles


@pytest.hookimpl(trylast=True)  # after fixtures of the file are gone
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        let_programs_go()


def let_programs_go():
    """Drop what JAX compiled, once there is much of it: each program for a CPU takes some of the 65530 memory maps that
    Linux gives a process, and LLVM crashes where there are none left."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        from mla_attn.passes.passes import forget_programs

        jax.clear_caches()
        forget_programs()
        gc.collect()


def pytest_report_header():
    checks = "checked at every call" if SHAPES_CHECKED else "NOT checked (beartype is not installed)"
    return f"jax {jax.__version__} on {jax.default_backend()}, shape annotations {checks}"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not selections.is_long(item.nodeid))
    for item in items:
        for name in selections.selections(item.nodeid):
            item.add_marker(name)
    whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("ignore")
    if whole_suite and (begins := selections.unmatched([item.nodeid for item in items])):
        raise pytest.UsageError(f"tests/lib/selections.py names tests that there are not: {', '.join(begins)}")
    if any("gpu" in item.keywords for item in items) and jax.default_backend() != "gpu":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def unchecked(monkeypatch):
    """Shape annotations are not checked, as for users: for tests of the library's own errors about shapes and types."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
