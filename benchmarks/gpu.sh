#!/usr/bin/env bash
# Checks and measures the triton backend on a GPU in under six minutes, see gpu.py. Needs torch and triton, no network.
#   [OUT=results/gpu] [PYTHON=python3] benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/gpu.py --out "${OUT:-results/gpu}"
