#!/usr/bin/env bash
# Everything CI runs, to the end even when a step fails. pytest is the last step; its closing line is the last line.
# However this script ends, what it has started ends with it.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE= # hundreds of processes import the package: it is compiled once
steps=$(mktemp) home=$(mktemp -d -t lmr-XXXXXX)
mkdir "$home"/{n,t,p}
failed=() running=() watched=

finish() {
    local group
    for group in "${running[@]}"; do kill "${group%:*}" -- "-${group#*:}" 2>/dev/null; done
    rm -rf "$steps"
    [[ $watched ]] || rm -rf "$home"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

begin() { # signal that ends it, command: in a group of its own, so that we hear a signal while it runs, and can pass it on
    set -m
    "${@:2}" </dev/null &
    set +m
    running+=("-$1:$!")
}
run() { begin INT "$@"; wait $!; }
step() { # name, command: its seconds and its end go to the table
    local began=${EPOCHREALTIME/[.,]/} result=ok
    echo "=== $1"
    "${@:2}" || { result=FAILED; failed+=("$1"); }
    local tenths=$(((${EPOCHREALTIME/[.,]/} - began) / 100000))
    printf '%-12s%8s s  %s\n' "$1" "$((tenths / 10)).$((tenths % 10))" "$result" >>"$steps"
    running=()
}
watch() { # somebody who sees to it when we cannot: kill -9 reaches no trap
    set -m
    .venv/bin/python tests/processes.py --after $$ "$home" "$home"/{n,t,p} </dev/null >/dev/null 2>&1 &
    set +m
    watched=$!
}
in_own_home() { # home, command: nothing may be left running in it
    LAMINAR_HOME=$1 LAMINAR_TEST_RUN=$1 "${@:2}"; local rc=$?
    .venv/bin/python tests/processes.py "$1" && return $rc
}
notebooks() { # with one thread each: they are three beside each other, and threads that wait for threads burn what the others need
    OMP_NUM_THREADS=1 in_own_home "$home/n" timeout --foreground -k 10 900 .venv/bin/nbdev_test --n_workers 2
}
tutorials() { in_own_home "$home/t" .venv/bin/python scripts/tutorials.py >"$home/said" 2>&1; }
kernels() { # the tutorials mostly wait for engines that start
    local rc=0 first second
    begin TERM notebooks; first=$!
    begin INT tutorials; second=$!
    wait "$first" || rc=1
    wait "$second" || rc=1
    cat "$home/said"
    return $rc
}

step install run scripts/venv.sh
((!${#failed[@]})) || exit 1
watch
step check run make --silent check
step style run make --silent style
step browser run scripts/browser.sh
step kernels kernels
[[ ${CI:-} == true ]] && set -- --long-sample 0.05 "$@"
echo '=== pytest'
LAMINAR_TEST_RUN=$home/p LAMINAR_STEPS=$steps run .venv/bin/python -m pytest tests "$@" || failed+=(pytest)
((!${#failed[@]})) || { echo "make test: FAILED: ${failed[*]}" >&2; exit 1; }
