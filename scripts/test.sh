#!/usr/bin/env bash
# Everything CI runs, to the end even when a step fails. pytest is the last step; its closing line is the last line.
set -uo pipefail
cd "$(dirname "$0")/.."
steps=$(mktemp) home=$(mktemp -d -t lmr-XXXXXX)
mkdir "$home"/{n,t}
trap '[[ $other ]] && kill -- -"$other"; rm -rf "$steps" "$home"' EXIT
failed=() other=

step() { # name, command: its seconds and its end go to the table
    local began=${EPOCHREALTIME/[.,]/} result=ok
    echo "=== $1"
    "${@:2}" || { result=FAILED; failed+=("$1"); }
    local tenths=$(((${EPOCHREALTIME/[.,]/} - began) / 100000))
    printf '%-12s%8s s  %s\n' "$1" "$((tenths / 10)).$((tenths % 10))" "$result" >>"$steps"
}
in_own_home() { # home, command: nothing may be left running in it
    LAMINAR_HOME=$1 LAMINAR_TEST_RUN=$1 "${@:2}"; local rc=$?
    .venv/bin/python tests/processes.py "$1" && return $rc
}
notebooks() { in_own_home "$home/n" timeout -k 10 900 .venv/bin/nbdev_test --n_workers 2; }
tutorials() { in_own_home "$home/t" .venv/bin/python scripts/tutorials.py; }
side_by_side() { # the second mostly waits for engines that start
    set -m # in a group of its own, which can be ended with us
    "$2" >"$home/said" 2>&1 & other=$!
    set +m
    "$1"; local rc=$?
    wait "$other" || rc=1
    other=
    cat "$home/said"
    return $rc
}

step install scripts/venv.sh
((!${#failed[@]})) || exit 1
step check make --silent check
step style make --silent style
step browser scripts/browser.sh
step kernels side_by_side notebooks tutorials
[[ ${CI:-} == true ]] && set -- --long-sample 0.05 "$@"
echo '=== pytest'
LAMINAR_STEPS=$steps .venv/bin/python -m pytest tests "$@" || failed+=(pytest)
((!${#failed[@]})) || { echo "make test: FAILED: ${failed[*]}" >&2; exit 1; }
