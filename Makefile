# Everything runs in .venv, which the first target that needs it makes.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test test-slow test-hf lint mutants cuda-aot clean

# Compiled Python is kept, whatever the shell says: without it every test process compiles all files for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

CHECKPOINT := $(addprefix tests/fixtures/,deepseek-v3-tiny llama3-tiny-fp8kv qwen3-tiny gemma2-tiny gpt-oss-tiny)
# Two processes, a file in one of them, in the order of tests/conftest.py: most of a test's time is tracing and compiling,
# on one core.
PYTEST := .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
JAX_VERSION = $(shell sed -n 's/^jax==//p' constraints.txt)

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s%s\n", $$1, $$2 }'

demo: .venv/installed-demo ## Generate text from a small checkpoint of each family, of DeepSeek-V3 also speculatively
	@.venv/bin/mla-attn demo $(CHECKPOINT)

quick: .venv/installed-test ## Run the tests for an inner loop: one dtype, one layout, no engine traffic
	@$(PYTEST) -m "quick and not slow"

test: .venv/installed-test ## Run the tests but the slow ones (options: .venv/bin/python -m pytest --help)
	@$(PYTEST) -m "not slow"

test-slow: .venv/installed-test ## Run the slow tests: notebooks, float32 twins, long generations
	@$(PYTEST) -m slow

test-hf: .venv/installed-hf ## Compare small random models with transformers (fetches it and torch, some gigabytes)
	@.venv/bin/python -m pytest tests/models/test_transformers.py

lint: .venv/installed-lint ## Check style, types and the direction of imports
	@.ci/lint .venv/bin

mutants: .venv/installed-test ## Break the code in many small ways and see the tests notice
	@.venv/bin/python -m tests.mutants $(CONTROL)

cuda-aot: .venv/cuda-aot/installed ## Fetch XLA's CUDA compiler, so that tests can compile for GPUs without one

clean: ## Remove .venv and every file that tools leave
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@python=$$(.ci/find-python) && echo "Making .venv with $$python" && "$$python" -m venv .venv

# installed-test installs the extra `test`, and so on; the demo needs none.
.venv/installed-demo: EXTRA :=
.venv/installed-test: EXTRA := [test,triton]
.venv/installed-lint: EXTRA := [lint]
.venv/installed-hf: EXTRA := [test,hf]
.venv/installed-%: pyproject.toml constraints.txt | .venv/bin/python
	@.ci/pip-install .venv/bin/python --constraint constraints.txt --editable '.$(EXTRA)'
	@touch $@

# Kept out of the environment's own packages: with it there, JAX would look for a GPU at every start.
.venv/cuda-aot/installed: constraints.txt | .venv/bin/python
	@.ci/pip-install .venv/bin/python --no-deps --upgrade --target .venv/cuda-aot jax-cuda13-pjrt==$(JAX_VERSION)
	@touch $@
