#!/usr/bin/env bash
# JupyterLab from .venv at the first tutorial: on 127.0.0.1 alone, with the token that Jupyter makes and prints in its URL
set -euo pipefail
cd "$(dirname "$0")/.."
echo "For a Jupyter of your own: $PWD/.venv/bin/python -m ipykernel install --user --name laminar"
echo 'JupyterLab starts; open the URL that it prints. Ctrl-C twice ends it, runs go on without it.'
((EUID)) && root= || root=--allow-root
exec .venv/bin/jupyter lab --no-browser --ip=127.0.0.1 $root \
    --LabApp.default_url=/lab/tree/tutorials/01_first_run.ipynb --ServerApp.root_dir="$PWD" "$@"
