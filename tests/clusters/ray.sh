#!/usr/bin/env bash
# The example for Ray Train on a Ray of this machine, with two workers. Ray is no dependency of
# offbeat: in an environment of its own, `pip install 'offbeat[lab]' 'ray[train]'`, then
# `make test-clusters RAY_PYTHON=/path/to/python`.
#
#     tests/clusters/ray.sh [PYTHON]
set -euo pipefail
python=${1:-.venv/bin/python}
"$python" -c 'import ray.train.torch' 2> /dev/null || {
  echo "Ray: not tested, since $python has no ray[train]; name another one by RAY_PYTHON=" >&2; exit 0; }
example=$(cd "$(dirname "$0")/../.." && pwd)/examples/clusters/ray_train.py
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
OMP_NUM_THREADS=1 RAY_TRAIN_V2_ENABLED=1 timeout 1800 \
  "$python" "$example" --workers 2 --epochs 5 --storage "$dir/results" | tee "$dir/out"
grep -q '^2 workers, 5 epochs: accuracy 0\.9' "$dir/out"
grep -q '^all workers have the same model: True$' "$dir/out"
echo "Ray: two workers of a local Ray trained"
