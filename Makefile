# `make` alone lists the targets. Each does its own set-up, and each may be run again.
.PHONY: help demo test test-browser test-long lab venv lock text sync nb readme check style
PY := .venv/bin/python

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

demo: venv ## a small model learns arithmetic: ARGS="--seed 1", or any other option of `laminar demo`
	@.venv/bin/laminar demo $(ARGS)

test: ## everything CI runs: ARGS="-k relay" goes to pytest
	@scripts/test.sh $(ARGS)

test-browser: venv ## the live view in JupyterLab and Notebook, driven in Chromium: a part of `make test`
	@scripts/browser.sh
	@$(PY) -m pytest tests/browser $(ARGS)

test-long: venv ## the long tests; figures, commit and machine go to results/
	@$(PY) -m pytest tests -m long --results results $(ARGS)

lab: venv ## JupyterLab at the first tutorial, on 127.0.0.1
	@scripts/lab.sh $(ARGS)

venv: ## .venv with everything in it; nothing to do when nothing changed
	@scripts/venv.sh

lock: ## compile requirements/cpu.lock from settings.ini: UPGRADE=1 moves the pins
	@scripts/venv.sh lock

text: ## notebooks -> .nbtext/, to edit in a terminal (the newer of the two wins)
	@find nbs tutorials -name '*.ipynb' -not -path '*/.*' -print0 | xargs -0r .venv/bin/jupytext --sync --quiet

sync: ## .nbtext/ -> notebooks (the newer wins): F=.nbtext/core/00_errors.py for one alone
	@find $(or $(F),.nbtext) -name '*.py' -print0 | xargs -0r .venv/bin/jupytext --sync --quiet

nb: ## notebooks -> laminar_sdk/, and clean them; one caller at a time
	@mkdir -p .stamps
	@flock .stamps/nb.lock sh -c '.venv/bin/nbdev_export && .venv/bin/nbdev_clean && .venv/bin/nbdev_clean --fname tutorials'

readme: ## README.md from nbs/index.ipynb
	@$(PY) scripts/readme.py

check: ## package and README are exactly what the notebooks give, and the notebooks are clean
	@scripts/check.sh

# Left to taste: signatures with docments are aligned, not indented by four; fields are annotated; short things stand on one line.
TASTE := continuation-indent,closing-bracket,lhs-assignment-annotation,consecutive-short-imports,semicolon,dict-literal,$\
	inefficient-multiline-signature,inefficient-multiline-expression,single-statement-body,nested-generics

style: ## unused imports, lines above 160 and the like (all.py imports for others to use)
	@.venv/bin/chkstyle --ignore $(TASTE) --skip-path 99_all.ipynb nbs tutorials
