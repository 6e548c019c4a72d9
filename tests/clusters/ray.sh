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
# In the same storage the second one goes on where the first one has ended.
for epochs in 3 5; do
  OMP_NUM_THREADS=1 RAY_TRAIN_V2_ENABLED=1 timeout 900 \
    "$python" "$example" --workers 2 --epochs "$epochs" --storage "$dir/results" | tee "$dir/out"
done
grep -q '^2 workers, 5 epochs: accuracy 0\.9' "$dir/out"
grep -q '^all workers have the same model: True$' "$dir/out"
[ "$(find "$dir/results/offbeat" -maxdepth 1 -name 'checkpoint_*' | wc -l)" = 5 ]  # one an epoch
echo "Ray: two workers of a local Ray trained, and went on from a checkpoint"
