# Everything starts from a fresh clone: each target first makes .venv, and installs there what it needs and lacks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
COMMA := ,

# Fail and name the variable to set if another server listens on the port. Whatever else is wrong, the server says itself.
require_free_port = if $(BIN)/python -c "import socket; socket.create_connection(('$(HOST)', $(PORT)), timeout=1)" 2>/dev/null; \
	then echo "another server listens on $(HOST):$(PORT): choose another port, such as make $@ PORT=8001"; exit 1; fi

.PHONY: help install serve demo chat lab site quick test compiled lectures nightly long lint browser servers clients neon build run figures bench gpu clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

# pip's report goes into a file; if pip fails, its end is shown. pip compiles modules on one processor, which takes as long as all the rest,
# so compileall does that on all of them (files that are no Python for this version are left as they are). On Linux without a GPU,
# `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install` takes torch without CUDA: a third of the download.
REPORT := $(VENV)/install.log
$(VENV)/made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -c constraints.txt --upgrade pip rich >$(REPORT) 2>&1 || { cat $(REPORT); exit 1; }
	@touch $@

# The packages of `.` or of its extras.
define pip_install
	@echo "Installing the packages $(2) that constraints.txt pins, a few minutes; pip's report is $(REPORT)"
	@$(BIN)/python -m nanovllm.checkpoint.pip_run $(REPORT) install --no-compile -c constraints.txt -e '$(1)'
	@echo "Compiling them"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

# Four levels, each with the ones before it: the engine; the lectures; the site; the tests with every optional part.
$(VENV)/serving: $(VENV)/made
	$(call pip_install,.,of the engine)
	@touch $@

$(VENV)/lectures: $(VENV)/made
	$(call pip_install,.[course],of the engine and the lectures)
	@touch $(VENV)/serving $@

$(VENV)/pages: $(VENV)/made
	$(call pip_install,.[site],of the engine$(COMMA) the lectures and the site)
	@touch $(VENV)/serving $(VENV)/lectures $@

$(VENV)/installed: $(VENV)/made
	$(call pip_install,.[course$(COMMA)dev],of the engine$(COMMA) the lectures and the tests)
	@touch $(VENV)/serving $(VENV)/lectures $(VENV)/pages $@

# What the site and the tests of its pages use of npm's packages, in the versions of package-lock.json.
NPM := $(VENV)/site/node_modules/.package-lock.json
$(NPM): nanovllm/lab/site/package.json nanovllm/lab/site/package-lock.json | $(VENV)/made
	@command -v npm >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends npm >/dev/null; } \
		|| echo "MISSING: npm, which comes with Node.js (https://nodejs.org): there is no site without it, and tests of its pages will be SKIPPED"
	@! command -v npm >/dev/null || { mkdir -p $(VENV)/site && cp $^ $(VENV)/site/ && npm ci --prefix $(VENV)/site --silent --no-audit --no-fund; } \
		|| echo "MISSING: npm could not install its packages (npm ci --prefix $(VENV)/site says why): tests of the site's pages will be SKIPPED"

install: $(VENV)/installed  ## make .venv and install everything, pinned
	@echo "Everything is installed. To use it in this shell: source $(VENV)/bin/activate"

serve: $(VENV)/serving  ## start the server on 127.0.0.1:8000 (HOST=, PORT=, ARGS=)
	@$(call require_free_port)
	$(BIN)/nanovllm serve --host $(HOST) --port $(PORT) $(ARGS)

demo: $(VENV)/serving  ## the same with a pool that is soon full, and bursts of requests as soon as the page is opened
	@$(call require_free_port)
	$(BIN)/nanovllm serve --host $(HOST) --port $(PORT) --demo --num-kv-blocks 96 --max-num-batched-tokens 256 --max-num-seqs 16 $(ARGS)

chat: $(VENV)/serving  ## talk to the course model in the terminal
	$(BIN)/nanovllm chat $(ARGS)

# Jupyter wants to be told that it is meant to run as root, which is usual in a container.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

lab: $(VENV)/lectures  ## open JupyterLab at your copy of the tour; all lectures are beside it
	@$(BIN)/python -m nanovllm.lab.course copy
	$(BIN)/jupyter lab $(AS_ROOT) --LabApp.extra_labextensions_path=nanovllm/lab/course/labextensions --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/my_notebooks/00_tour.ipynb $(ARGS)

site: $(VENV)/pages $(NPM)  ## write the course as web pages into _site/ (SITE_URL=https://...: with a sitemap)
	@SITE_URL=$(SITE_URL) SITE_REPOSITORY=$(SITE_REPOSITORY) $(BIN)/python -m nanovllm.lab.site $(ARGS)

lint: $(VENV)/installed  ## style, types, English, and modules equal to their lectures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check nanovllm tests
	$(BIN)/mypy
	$(BIN)/python -m tests.english --check
	$(BIN)/python -m nanovllm.lab.course build --check

# The system's Chromium or else playwright's own; only root can install the first.
browser: $(VENV)/installed  ## Chromium, for the tests of pages and widgets
	@test -x /usr/bin/chromium \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| $(BIN)/playwright install chromium

# What tests of shared KV pools need of the system: a Redis server, and a library that Mooncake links to.
servers:  ## Redis and libibverbs, for the tests of KV pools (as root; else those tests are skipped)
	@command -v redis-server >/dev/null && ldconfig -p 2>/dev/null | grep -q 'libibverbs[.]so[.]1' \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq \
			&& apt-get install -y -qq --no-install-recommends redis-server libibverbs1 iproute2 >/dev/null; } \
		|| echo "MISSING: redis-server or libibverbs1, and only root can install them: tests of KV pools will be SKIPPED"

# torch, which guidellm imports, is the one of .venv: at the end of the path, so that all other packages are its own.
CLIENTS := .venv-clients
$(CLIENTS)/installed: $(VENV)/installed tests/clients/requirements.txt
	@echo "Making $(CLIENTS) with the programs that tests/clients/requirements.txt pins"
	@rm -rf $(CLIENTS)
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --no-deps -r tests/clients/requirements.txt
	@$(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
		>$$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch_of_the_project.pth
	@touch $@

clients: $(CLIENTS)/installed  ## litellm, LangChain, instructor and guidellm in .venv-clients, for their tests (else skipped)

neon:  ## a compiler and an emulator for ARM, for the tests of its kernels (as root; else those tests are skipped)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq \
			&& apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null; } \
		|| echo "MISSING: g++-aarch64-linux-gnu or qemu-user, and only root can install them: tests of ARM's kernels will be SKIPPED"

# What is compiled is kept, whatever the environment says: the tests' asserts alone take each run seven seconds.
export PYTHONDONTWRITEBYTECODE :=

# Four workers for two cores, as tests wait for processes a third of their time; one thread each. Without nbval a run, and each run that
# a test starts, begins two seconds sooner.
TESTS := OMP_NUM_THREADS=1 PYTEST_ADDOPTS="-p no:nbval" $(BIN)/python -m pytest -n 4 --dist worksteal --durations=30
# All workers need them at once: else each compiles its own.
KERNELS := $(BIN)/python -c "from nanovllm.ops import native; native.is_available()"
QUICK := $(addprefix tests/,test_house.py test_reading_order.py english test_project.py test_pairwise.py text checkpoint/test_model_files.py core \
	trace/test_trace.py kv_transfer/test_kv_layout.py kv_transfer/test_transfer_scheduler.py supervision/test_standstill.py \
	lab/course/test_course_build.py lab/course/test_course_teaching.py)

# Two lectures at a time, the long ones first: times are compared within a lecture, and what must hold holds on a busy machine, too.
# Threads that wait for one another sleep: two lectures whose threads spin take each other's processors. OMP_WAIT_POLICY would not
# reach the engines that the ladder compares (lab/bench/engines.py): `transformers` made 14 tokens per second so, and 0.5 without.
LECTURES_TEST := PYTHONHASHSEED=0 GOMP_SPINCOUNT=0 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --nbval --nbval-current-env \
	--nbval-cell-timeout 600 -p tests.forked_kernels -p tests.selection --nbval-sanitize-with nanovllm/lab/course/sanitize.cfg

# Older CPUs than this one: what the compiler uses for our kernels, then what torch and its libraries use.
NO_AMX := -mno-amx-tile -mno-amx-bf16
AS_AVX512 := CXXFLAGS="-mno-avx512bf16 $(NO_AMX)" ONEDNN_MAX_CPU_ISA=AVX512_CORE
AS_AVX2 := CXXFLAGS="-mno-avx512f $(NO_AMX)" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AS_PLAIN := NANOVLLM_NATIVE=0 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
# Without tests that choose the instructions themselves, those of threads and of the scheduler's features, and kernels in Triton's interpreter,
# which numpy computes. These wait for no processes, and each worker imports torch first: two of them. By night all tests run so (as-AVX2, as-PLAIN).
NUMERICS := -n 2 -m "not slow and not nightly" $(addprefix tests/,ops layers attention) \
	-k "not building and not older_machines and not test_emulated and not loops_of_several and not interpreted and not course_model and not features_change"

quick: $(VENV)/installed  ## tests without processes, servers and browser
	$(TESTS) -m "not slow and not nightly" $(QUICK)

ifdef PACKAGE
test: browser servers $(NPM)
	@paths="$$($(BIN)/python -m tests.selection packages $(PACKAGE))" || exit; \
	echo "Tests in $$paths"; $(TESTS) $$paths
else
test: browser servers $(NPM)  ## everything: lint, tests, GPU kernels, lectures (PACKAGE="core server": tests of these and what uses them)
	$(MAKE) -j 2 --output-sync=target lint compiled
	$(KERNELS)
	$(TESTS) tests --deselect tests/test_project.py::test_no_phrase_occurs_more_often_than_stored
	$(AS_AVX2) $(KERNELS)
	$(AS_AVX2) $(TESTS) $(NUMERICS)
	$(AS_PLAIN) $(TESTS) $(NUMERICS)
	$(MAKE) lectures
endif

# By day all sizes for one GPU, and one size for two that differ from it most: an older one with less memory on chip, and AMD's.
compiled: $(VENV)/installed
	$(BIN)/nanovllm kernels --dtype bfloat16 --target sm_90
	$(BIN)/nanovllm kernels --dtype bfloat16 --target sm_80 gfx942 --head-dim 64

# EVERY=--all, which nightly sets: also lectures that have passed here and did not change since, nor the modules they import.
EVERY ?=
lectures: $(VENV)/installed  ## run lectures, and compare their outputs; those that have passed unchanged only with EVERY=--all
	@lectures="$$($(BIN)/python -m tests.selection lectures $(EVERY))" || exit; \
	if [ -n "$$lectures" ]; then $(LECTURES_TEST) -n 2 --dist loadfile $$lectures; \
	else echo "All lectures have passed, and nothing that they use has changed. To run them: make lectures EVERY=--all"; fi

nightly: export EVERY = --all
nightly: clients test long as-AVX512 as-AVX2 as-PLAIN  ## test, long attacks, soaks and all pairs, all tests as on older CPUs (make -k: to the end)

long: browser servers neon $(NPM)
	$(TESTS) -o faulthandler_timeout=0 -m nightly tests
	$(BIN)/nanovllm kernels

as-%: export NANOVLLM_TEST_EXAMPLES := all
as-%: export NANOVLLM_TEST_SEED ?= $(shell date +%F)
as-%: browser servers $(NPM)
	$(AS_$*) $(TESTS) tests

build: $(VENV)/installed  ## write the modules from the lectures
	$(BIN)/python -m nanovllm.lab.course build

run: $(VENV)/installed  ## execute all lectures and save them (LECTURES=...)
	$(BIN)/python -m nanovllm.lab.course run $(LECTURES)

figures: $(VENV)/installed  ## redraw figures/
	$(BIN)/python -m nanovllm.lab.viz figures
	$(BIN)/python notebooks/films.py figures

bench: $(VENV)/installed  ## measure (ARGS="throughput --workload W2", see nanovllm bench --help)
	$(BIN)/nanovllm bench $(ARGS)

# Where there is no .venv it begins with PYTHON: a GPU's machine often has a torch of its own, built for its driver.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_FILES = $(if $(findstring --dry-run,$(ARGS)),,--json figures/gpu.json --markdown figures/gpu.md)

GPU_LADDER = $(if $(findstring --dry-run,$(ARGS)),,&& PYTHONPATH=. $$python -m nanovllm bench ladder --markdown figures/ladder_gpu.md)

gpu:  ## test and measure on an NVIDIA GPU, in ten minutes (ARGS=--dry-run: the same code on the CPU)
	@python=$$($(GPU_PYTHON) nanovllm/lab/bench/gpu/environment.py) && \
		PYTHONPATH=. $$python -m nanovllm bench gpu $(GPU_FILES) $(ARGS) $(GPU_LADDER)

clean:  ## remove .venv, _site and caches
	rm -rf $(VENV) $(CLIENTS) _site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
