#!/usr/bin/env bash
# A real SLURM on this machine: two nodes, on which `srun offbeat run` trains two ranks. Needs root,
# and slurmctld, slurmd, srun and munged (Debian: slurmctld slurmd slurm-client munge). Everything
# is below a directory of its own, and ends with this script.
#
#     tests/clusters/slurm.sh [DIRECTORY OF offbeat AND python]
set -euo pipefail
for program in slurmctld slurmd srun munged; do
  command -v $program > /dev/null || {
    echo "$program is missing; on Debian: apt install slurmctld slurmd slurm-client munge" >&2; exit 1; }
done
bin=$(cd "${1:-.venv/bin}" && pwd)
dir=$(mktemp -d)
chmod 755 "$dir"
started=()
trap '[ ${#started[@]} = 0 ] || kill "${started[@]}" 2> /dev/null || true; wait; rm -rf "$dir"' EXIT

mkdir -p "$dir"/{state,spool1,spool2,munge}
dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 status=none
chmod 700 "$dir/munge"; chmod 400 "$dir/munge/key"
munged --foreground --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" \
  --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed" --log-file="$dir/munge/log" &
started+=($!)

cat > "$dir/slurm.conf" << CONF
ClusterName=offbeat
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
SlurmctldPort=17817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17001 CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17002 CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES State=UP
CONF
export SLURM_CONF="$dir/slurm.conf"
for _ in $(seq 50); do [ -S "$dir/munge/socket" ] && break; sleep 0.1; done
slurmctld -D & started+=($!)
slurmd -D -N n1 & started+=($!)
slurmd -D -N n2 & started+=($!)
for _ in $(seq 100); do [ "$(sinfo -h -t idle -o %D)" = 2 ] && break; sleep 0.2; done
sinfo

cat > "$dir/train.py" << 'SCRIPT'
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(20):
    x = torch.randn(16, 8)
    (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.environ['SLURMD_NODENAME']}: trained")
dist.destroy_process_group()
SCRIPT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29817 OMP_NUM_THREADS=1
cd "$dir"
srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --chdir "$dir" \
  "$bin/offbeat" run --strategy gtopk:density=0.1 --out "$dir/record" train.py | tee "$dir/out"
[ "$(grep -c ': trained$' "$dir/out")" = 2 ]
[ "$(grep -o 'on n[12]' "$dir/out" | sort -u | wc -l)" = 2 ]
"$bin/python" -c "
import json, sys
summary = json.load(open('$dir/record/summary.json'))
assert summary['steps'] == 20, summary
"
echo "SLURM: two ranks on two nodes trained"
