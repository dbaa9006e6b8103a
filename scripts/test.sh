#!/usr/bin/env bash
# Everything CI runs, to the end even when a step fails. pytest is the last step; its closing line is the last line.
set -uo pipefail
cd "$(dirname "$0")/.."
steps=$(mktemp) home=$(mktemp -d -t lmr-XXXXXX)
trap 'rm -rf "$steps" "$home"' EXIT
failed=()

step() { # name, command: its seconds and its end go to the table
    local began=${EPOCHREALTIME/[.,]/} result=ok
    echo "=== $1"
    "${@:2}" || { result=FAILED; failed+=("$1"); }
    local tenths=$(((${EPOCHREALTIME/[.,]/} - began) / 100000))
    printf '%-12s%8s s  %s\n' "$1" "$((tenths / 10)).$((tenths % 10))" "$result" >>"$steps"
}
in_own_home() { # nothing may be left running in it
    LAMINAR_HOME=$home LAMINAR_TEST_RUN=$home "$@"; local rc=$?
    .venv/bin/python tests/processes.py "$home" && return $rc
}
notebooks() { in_own_home timeout -k 10 900 .venv/bin/nbdev_test --n_workers 2; }
tutorials() { in_own_home .venv/bin/python -m pytest --nbmake --nbmake-timeout=600 --timeout=900 -q --no-header tutorials; }

step install scripts/venv.sh
((!${#failed[@]})) || exit 1
step check make --silent check
step style make --silent style
step browser scripts/browser.sh
step notebooks notebooks
step tutorials tutorials
[[ ${CI:-} == true ]] && set -- --long-sample 0.05 "$@"
echo '=== pytest'
LAMINAR_STEPS=$steps .venv/bin/python -m pytest tests "$@" || failed+=(pytest)
((!${#failed[@]})) || { echo "make test: FAILED: ${failed[*]}" >&2; exit 1; }
