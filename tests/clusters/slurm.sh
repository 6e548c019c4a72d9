#!/usr/bin/env bash
# A real SLURM on this machine with two nodes, on which `srun offbeat run` trains two ranks; a job is
# requeued and goes on from its checkpoint; and a worker that is killed comes back. Needs root, and
# slurmctld, slurmd, srun and munged (Debian: slurmctld slurmd slurm-client munge). Everything is
# below a directory of its own, and ends with this script.
#
#     tests/clusters/slurm.sh [DIRECTORY OF offbeat AND python]
set -euo pipefail
for program in slurmctld slurmd srun sbatch munged; do
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

cat > "$dir/head.py" << 'SCRIPT'
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def step():
    x = torch.randn(16, 8)
    (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def end():
    print(f"rank {rank} of {dist.get_world_size()} on {os.environ['SLURMD_NODENAME']}: trained")
    dist.destroy_process_group()
SCRIPT
cat > "$dir/train.py" << 'SCRIPT'
from head import *

for _ in range(20):
    step()
end()
SCRIPT
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29817 OMP_NUM_THREADS=1
cd "$dir"
srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --chdir "$dir" \
  "$bin/offbeat" run --strategy gtopk:density=0.5:collective=reduce_scatter --out "$dir/record" train.py | tee "$dir/out"
[ "$(grep -c ': trained$' "$dir/out")" = 2 ]
[ "$(grep -o 'on n[12]' "$dir/out" | sort -u | wc -l)" = 2 ]
"$bin/python" -c "
import json, sys
summary = json.load(open('$dir/record/summary.json'))
assert summary['steps'] == 20, summary
"
echo "SLURM: two ranks on two nodes trained"

# A job that is requeued in the middle of training: SLURM ends it and starts it again.
cat > "$dir/resume.py" << 'SCRIPT'
import subprocess
import time
from head import *

path, begin = f"checkpoint-{rank}.pt", 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["steps"]
for number in range(begin + 1, 41):
    step()
    if number % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": number}
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)
    if number == 25 and not begin:
        if rank == 0:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        time.sleep(120)  # SLURM ends this process long before
print(f"rank {rank} went on from step {begin}")
end()
SCRIPT
cat > "$dir/job.sh" << JOB
#!/usr/bin/env bash
srun "$bin/offbeat" run --strategy gtopk:density=0.5:collective=reduce_scatter \\
  --out "$dir/record-\${SLURM_RESTART_COUNT:-0}" resume.py
JOB
export MASTER_PORT=29818
job=$(sbatch --parsable --requeue --nodes 2 --ntasks 2 --ntasks-per-node 1 --chdir "$dir" \
  --open-mode append --output "$dir/job.out" "$dir/job.sh")
for _ in $(seq 300); do
  state=$(squeue -h -j "$job" -o %T 2> /dev/null || true)
  [ -n "$state" ] || break
  # SLURM lets a requeued job wait for two minutes, which a test need not.
  [ "$state" != PENDING ] || scontrol update JobId="$job" StartTime=now 2> /dev/null || true
  sleep 0.5
done
cat "$dir/job.out"
[ "$(grep -c 'went on from step 20$' "$dir/job.out")" = 2 ]
[ "$(grep -c ': trained$' "$dir/job.out")" = 2 ]
"$bin/python" -c "
import json
summary = json.load(open('$dir/record-1/summary.json'))
assert summary['steps'] == 20, summary
assert summary['replicas_identical'], summary
"
echo "SLURM: a job was requeued on two nodes and went on from its checkpoint"

# A worker that is killed: the supervisor on its node starts it again, the other one goes on.
cat > "$dir/back.py" << 'SCRIPT'
import signal
from head import *

came_back, number = "OFFBEAT_RETURN" in os.environ, 0
while number < 60 or not os.path.exists("back"):
    step()
    number += 1
    if came_back and number == 5:
        open("back", "w").close()
    if rank == 1 and number == 20 and not came_back:
        os.kill(os.getpid(), signal.SIGKILL)
end()
SCRIPT
srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --no-kill --kill-on-bad-exit=0 --chdir "$dir" \
  bash -c "exec '$bin/offbeat' run --rendezvous 127.0.0.1:29819 --nodes 2 --workers 1 --restarts 1 \
    --node-rank \$SLURM_NODEID --strategy wagma --out '$dir/returns-'\$SLURM_NODEID back.py" \
  2>&1 | tee "$dir/out"
grep -q 'worker 1 died after step .* (killed by SIGKILL); 1 of 2 went on' "$dir/out"
grep -q 'worker 1 is back: it goes on from step' "$dir/out"
echo "SLURM: a worker was killed on one of two nodes and came back"
