#!/usr/bin/env bash
# A Chromium for the browser tests: nothing to do where there is one; as root on Debian it is installed; else it says what will be skipped
set -uo pipefail
for name in "${LAMINAR_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    [[ -n $name ]] && command -v "$name" >/dev/null && { echo "browser: $(command -v "$name")"; exit 0; }
done
if ((EUID == 0)) && command -v apt-get >/dev/null; then
    echo 'browser: no Chromium, installing it from Debian'
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) >/dev/null &&
        { echo "browser: $(command -v chromium)"; exit 0; }
fi
echo 'browser: no Chromium, and none could be installed here: the tests in tests/browser ARE SKIPPED (set LAMINAR_CHROMIUM, or install chromium)' >&2
