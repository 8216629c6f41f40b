# Everything works from a clean clone: the first target that is asked for makes .venv, later ones reuse it.
#
#   make serve            a model answering on http://127.0.0.1:8000        MODEL=... DEVICE=... PORT=... ARGS="..."
#   make demo             one prompt, one answer                            MODEL=... DEVICE=...
#   make test             the whole suite                                   ARGS="tests/scheduler -k preempt"
#   make lint             ruff and mypy
#   make bench            offline throughput of the built-in workload      MODEL=... DEVICE=... ARGS="--repeat 3"
#   make bench-growth     plots of how times grow, into docs/plots          MODEL=... ARGS="--repeat 3"
#   make conformance      the conformance kit against one device            DEVICE=...
#   make kernels          every Triton kernel compiled, without a GPU        ARGS="--arch sm_90 --op rms_norm"
#   make grpc             the Python code of the gRPC definition
#   make install          only the environment                              PYTHON=python3.12 PIP_ARGS="..."

MODEL  ?= smollm2-135m
DEVICE ?= cpu
PORT   ?= 8000
ARGS   ?=
# Numbers of compute threads that bench-growth compares.
THREADS ?= 1,2
# Processes that share the test files; every file stays in one of them.
JOBS   ?= 2

VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
PYTHON   ?= python3
PIP_ARGS ?=

# Core and every plugin that is in the tree, all in one pip command, so that they find each other here and not in an index.
PLUGINS  := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
# What the environment is made from; a change to any of it refreshes the environment.
NATIVE   := $(shell find plugins -not -path '*/build/*' \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.inl' -o -name '*.cmake' \
              -o -name CMakeLists.txt \) 2>/dev/null)
INPUTS   := Makefile pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml) $(NATIVE)

.DEFAULT_GOAL := help
.PHONY: help install serve demo test lint format bench bench-growth conformance kernels docs grpc clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

install: $(STAMP)

$(STAMP): $(INPUTS)
	@tools/check-tools $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]' $(addprefix -e ./,$(PLUGINS))
	@touch $@

serve: $(STAMP)
	$(BIN)/enginecore serve $(MODEL) --device $(DEVICE) --port $(PORT) $(ARGS)

demo: $(STAMP)
	$(BIN)/enginecore generate $(MODEL) --device $(DEVICE) --prompt "The three laws of robotics are" --max-tokens 64 --temperature 0 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy core/enginecore $(foreach p,$(PLUGINS),$(wildcard $(p)/enginecore_*))

format: $(STAMP)
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/enginecore bench throughput $(MODEL) --device $(DEVICE) $(ARGS)

# Nothing else should run on the machine meanwhile.
bench-growth: $(STAMP)
	@mkdir -p docs/plots
	$(BIN)/enginecore bench latency $(MODEL) --device $(DEVICE) --kv-cache-memory 1GiB \
	  --speculation off --batch-sizes 1,2,4,8,16,32,64,128 --contexts 128,1000,2000,4000,8000 --threads $(THREADS) \
	  --output-len 32 --repeat 1 --plot docs/plots/growth.svg --json $(ARGS) > docs/plots/growth.json

conformance: $(STAMP)
	$(BIN)/enginecore conformance --device $(DEVICE) $(ARGS)

kernels: $(STAMP)
	$(BIN)/python -m enginecore_triton.aot $(ARGS)

docs: $(STAMP)
	$(BIN)/python tools/write_cli_docs.py
	$(BIN)/python tools/write_support_docs.py

grpc: $(STAMP)
	$(BIN)/python tools/write_grpc_code.py

clean:
	rm -rf $(VENV) build dist plugins/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
