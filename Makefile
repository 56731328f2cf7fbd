# Needs make, Python >= 3.11 and a package index. `make` alone lists the targets.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
MARK ?=
# A file's tests share one worker, so what a module sets up once (a compiled engine) is set up once. There is a worker
# more than processors, up to 4, because tests of servers wait a quarter of their time.
PYTEST_ARGS ?= --numprocesses $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4))) --dist loadfile
# What depends most on JAX's version: PyTorch's results, the kernels as JAX calls them, and one server.
NEWEST_TESTS = tests/runtime/models/test_golden.py tests/service/servicers/test_goldens.py tests/runtime/ops/native \
	tests/runtime/ops/gpu tests/runtime/ops/tpu \
	tests/service/cli/test_serve.py::test_a_checkpoint_is_served_until_sigterm -k 'not emulated'
AGAINST ?= HEAD~1
# `make check SINCE=REV` runs clang-tidy only over the kernels that have changed since a commit.
SINCE ?=
# What of the sweep `make test-ci` runs: the seventh that a number draws, here the commit's, and what changes since a
# commit touch.
DRAW ?= $(shell git rev-list --count HEAD)
TOUCHED ?= $(AGAINST)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OWN_PATH := $(PATH)
export PATH := $(abspath $(BIN)):$(PATH)
# Some environments set it. The tests start hundreds of processes, and without bytecode on disk each of them would
# compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

# The C++ of the native kernels.
KERNELS = $(wildcard runtime/penstock/runtime/ops/native/src/*/*.cc runtime/penstock/runtime/ops/native/src/*/*.h)

BENCH_OUT ?= bench/out
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install install-newest wheel run test test-ci test-all test-newest test-accelerators test-clients bench bench-compare docs check format-check lint types imports protos-check proto proto-go breaking format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## create .venv and install the project with its tools

# The pins hold on the Pythons they were tried on: JAX 0.10 on 3.11, and 0.11 on 3.12 and 3.13. Another Python gets the
# newest that pyproject.toml allows.
CONSTRAINTS = $$($(BIN)/python -c 'import sys; print("--constraint constraints.txt" * (sys.version_info < (3, 14)))')

# Whoever only tests needs no docs, which make the site.
EXTRAS ?= dev,docs
# Without hatchling's hooks, because an editable install needs no native library inside, nor JAX to compile it. Without
# the bytecode of all packages, which takes most of an installation's time: each module's is written when it is imported.
INSTALL = HATCH_BUILD_NO_HOOKS=true $(BIN)/python -m pip install --disable-pip-version-check --no-compile \
	--editable clients/python --editable

# For the CPU kernels; where they cannot be built it says why, and everything runs on XLA. Tests run it first, because
# each of their workers would compile kernels that have changed.
BUILD_KERNELS = $(BIN)/python -m penstock.runtime.ops.native.build

$(STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; say make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || (set -x; $(PYTHON) -m venv $(VENV))
	@# A file that has moved from one of the two distributions to the other would be removed with the old one.
	$(BIN)/python -m pip uninstall --disable-pip-version-check --quiet --quiet --yes penstock penstock-client
	$(INSTALL) '.[$(EXTRAS)]' $(CONSTRAINTS)
	$(BUILD_KERNELS)
	@touch $(STAMP)

wheel: install ## build the wheels and sdists of penstock-client and penstock into dist/
	@# auditwheel finds patchelf on PATH.
	$(BIN)/python -m tools.wheels --out dist

run: install ## serve the demo model on 127.0.0.1 and print a sample
	@# With the caller's own PATH, so that the lines it prints work in the caller's other terminal.
	PATH="$(OWN_PATH)" $(BIN)/python -m penstock.cli demo

test: install ## run the tests that take minutes together (MARK='not gpu' or PYTEST_ARGS=tests/service narrow it)
	$(BUILD_KERNELS)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --hypothesis-profile penstock-few -m 'not (ci or sweep)$(if $(MARK), and ($(MARK)))'

test-ci: install ## run what CI runs: also the costly tests, and of the sweep a seventh (DRAW=980 TOUCHED=HEAD~1 repeat a run)
	$(BUILD_KERNELS)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --hypothesis-profile penstock-ci --draw '$(DRAW)' --touched '$(TOUCHED)' $(if $(MARK),-m '$(MARK)')

test-all: install ## run every test, with programs compiled as users compile them
	$(BUILD_KERNELS)
	PENSTOCK_TEST_XLA=users $(BIN)/python -m pytest $(PYTEST_ARGS) $(if $(MARK),-m '$(MARK)')

# Of the Pythons that constraints.txt was tried on. pyenv's programs start only if PYENV_VERSION names a version that
# pyenv has, and other programs do not read it.
SAYS_VERSION = import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])
OWN = $(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) -c '$(SAYS_VERSION)')
NEWEST = $(firstword $(foreach v,3.13 3.12,$(shell PYENV_VERSION=$v python$v -c '$(SAYS_VERSION)' 2>/dev/null)) $(OWN))
NEWEST_VENV = $(if $(filter-out $(OWN),$(NEWEST)),.venv-$(NEWEST))

install-newest: ## create the environment of test-newest
	$(if $(NEWEST_VENV),$(MAKE) --no-print-directory install VENV=$(NEWEST_VENV) EXTRAS=dev \
		PYTHON="$$(PYENV_VERSION=$(NEWEST) python$(NEWEST) -c 'import sys; print(sys.executable)')")

test-newest: install install-newest ## run the goldens, the kernels and a server on the newest Python that the machine has
	$(if $(NEWEST_VENV),$(NEWEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(NEWEST_TESTS) \
		-m 'not sweep$(if $(MARK), and ($(MARK)))',@echo "the newest Python here is $(OWN), as in $(VENV), so there is nothing more to test")

# XLA compiles for TPUs and GPUs that are not there. The plugin for CUDA must have jaxlib's version, and libtpu the one
# that this JAX names: JAX cannot read what a newer one makes of some programs. They have a folder that only these tests
# look into, because JAX takes a plugin that it finds for a device that is there.
PLUGINS = $(VENV)/accelerators
test-accelerators: install ## compile every program for TPUs and GPUs that are not there (450 MB; DRAW=7 takes a few cases)
	@jax=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && test -e "$(PLUGINS)/of-jax-$$jax" || { \
		rm -rf $(PLUGINS) && $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --target $(PLUGINS) \
			"$$($(BIN)/python -c 'from importlib.metadata import requires; print(*(need.split(";")[0] for need in requires("jax") if need.startswith("libtpu")))')" \
			"jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" nvidia-cuda-nvcc && touch "$(PLUGINS)/of-jax-$$jax"; }
	PYTHONPATH=$(PLUGINS) $(BIN)/python -m pytest tests/accelerators $(if $(filter-out file,$(origin DRAW)),--part '$(DRAW)')

# It also takes the commands of the pages, because their lines of grpcurl need Go.
test-clients: install ## run the tests of the clients for Go and Java, and of what all languages must agree on
	PENSTOCK_REQUIRE_TOOLCHAINS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) $(if $(MARK),-m '$(MARK)') \
		tests/conformance tests/clients/go tests/clients/java \
		tests/docs/test_blocks.py::test_commands_run_in_the_order_of_the_page

bench: install ## measure the engine on a random checkpoint of the Qwen3-0.6B shape (bench/README.md)
	@test -f $(BENCH_OUT)/model/model.safetensors || (set -x; $(BIN)/python -m bench.checkpoint --out $(BENCH_OUT)/model)
	$(BIN)/python -m bench.run --checkpoint $(BENCH_OUT)/model --out $(BENCH_OUT)/inprocess.jsonl

bench-compare: install ## compare this tree's speed with another commit's, in turns (AGAINST=REV BENCH_ARGS='--rounds 5')
	@test -f $(BENCH_OUT)/model/model.safetensors || (set -x; $(BIN)/python -m bench.checkpoint --out $(BENCH_OUT)/model)
	$(BIN)/python -m bench.compare --against '$(AGAINST)' --checkpoint $(BENCH_OUT)/model \
		--out $(BENCH_OUT)/compare.jsonl $(BENCH_ARGS)

docs: install ## build the site into site/, with links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean
	@echo "the site is in site/; open site/index.html"

check: format-check lint types imports protos-check docs $(if $(SKIP_TESTS),,test) ## style, types, import law, protos, the site, and the tests (SKIP_TESTS=1 leaves them out)

format-check: install
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(KERNELS)

lint: install
	$(BIN)/ruff check
	$(BIN)/python -m tools.clang_tidy $(if $(SINCE),--since '$(SINCE)')

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports --no-logo

protos-check: install
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(BIN)/buf generate --output "$$fresh" 2>/dev/null \
		&& diff -r -x '*.proto' -x __init__.py -x py.typed -x __pycache__ "$$fresh/protos" protos \
		|| { echo "the code in protos/ is not what the .proto files generate: make proto" >&2; exit 1; }

proto: install ## generate the Python code of protos/, the contract's page and Envoy's descriptors again, and with Go the code of clients/go
	$(BIN)/buf generate
	$(BIN)/python -m tools.reflected_comments
	$(BIN)/python -m tools.site.contract
	$(BIN)/python -m tools.descriptors
	$(BIN)/buf generate --template buf.gen.gateways.yaml
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory proto-go; \
		else echo "there is no Go here, so the code in clients/go is as it was: say make proto-go where there is" >&2; fi

proto-go: install ## generate the Go code of clients/go from protos/ again
	$(BIN)/buf generate --template clients/go/buf.gen.yaml

breaking: install ## compare the contract with an earlier commit (AGAINST=HEAD~1)
	tools/breaking.sh '$(AGAINST)'

format: install ## format Python, C++ and the .proto files, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(KERNELS)
	$(BIN)/buf format --write

lock: install ## pin the newest versions that pyproject.toml allows in constraints.txt
	$(BIN)/uv pip compile --quiet --universal --fork-strategy fewest --upgrade --extra dev --extra docs --no-annotate \
		--no-emit-index-url --no-emit-find-links --no-emit-package penstock-client --custom-compile-command 'make lock' \
		--output-file constraints.txt pyproject.toml

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build site
	find . -name __pycache__ -type d -not -path './node_modules/*' -prune -exec rm -rf {} +
