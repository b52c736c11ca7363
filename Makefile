# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test thorough lint soak bench clean

demo: $(STAMP)
	$(BIN)/farflung demo --out out/demo

# Some hundred processes import the same modules, and pytest rewrites the asserts of 170 files: compiled once, for all of them.
unexport PYTHONDONTWRITEBYTECODE

# Of 14,000 modules that are installed few are ever imported: each is compiled when it is.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(STAMP) lint
	$(PYTEST) -m "not slow and not thorough"
	$(PYTEST) -m "slow and not thorough" $$(grep -rl --include='*.py' mark.slow tests)   # real processes, which mostly wait

thorough: $(STAMP)                # what `make test` leaves out: further cases, and the longest stories
	$(PYTEST) -m thorough $$(grep -rl --include='*.py' -e mark.thorough -e tests.thorough tests)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

SOAKED = --repeat-every 10 --kept out/soak.jsonl
soak: $(STAMP)                    # seeded misfortune under virtual time, every tenth twice (same seed, same log): 10,000 brisk swarms, 1,000 that lose all power at once, 500 larger ones, 1,000 pipelines that lose stages, 500 that lose all power as well; hours, and it goes on where it was interrupted
	$(BIN)/python -m farflung.sims.chaos --kind brisk --seeds 10000 $(SOAKED)
	$(BIN)/python -m farflung.sims.chaos --kind dark --seeds 1000 $(SOAKED)
	$(BIN)/python -m farflung.sims.chaos --seeds 500 $(SOAKED)
	$(BIN)/python -m farflung.sims.chaos_pipeline --seeds 1000 $(SOAKED)
	$(BIN)/python -m farflung.sims.chaos_pipeline --kind dark --seeds 500 $(SOAKED)

bench: $(STAMP)
	$(BIN)/farflung bench overhead
	$(BIN)/farflung bench round
	$(BIN)/farflung bench overlap
	$(BIN)/farflung bench unequal
	$(BIN)/farflung bench churn
	$(BIN)/farflung bench codec
	$(BIN)/farflung bench feedback
	$(BIN)/farflung bench pipeline
	$(BIN)/farflung bench fidelity
	$(BIN)/farflung bench scale
	$(BIN)/farflung bench quality --tier ci
	$(BIN)/farflung bench recovery

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out build dist *.egg-info
