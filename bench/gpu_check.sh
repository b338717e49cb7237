#!/usr/bin/env bash
# Check a CUDA machine on which nothing can be installed. DRY=1 or --dry: the same on the CPU, tiny.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--dry" ]; then DRY=1; fi
export DRY="${DRY:-0}"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
mkdir -p build/path
ln -sfn ../.. build/path/pagedraft
export PYTHONPATH="$PWD/build/path${PYTHONPATH:+:$PYTHONPATH}"
# The root stays off sys.path, where transformers would take kernels/ for a package it looks for.
export PYTHONSAFEPATH=1
export TRITON_INTERPRET="$DRY"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/build/gpu-cache}"
export HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1
if [ "$DRY" = 1 ]; then export OMP_NUM_THREADS=1; fi
exec "$PYTHON" -m pagedraft.bench.gpu_check
