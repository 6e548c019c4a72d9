#!/usr/bin/env bash
# The command of examples/clusters/indexed-job.yaml, as it stands there, in two network namespaces that stand for two
# pods: with the pods' names, their range of ports, and a rule that admits what the NetworkPolicy admits. Only the number
# of pods is another. Needs root; no Kubernetes is there, which was never tried.
#
#     tests/clusters/kubernetes.sh [FOLDER WITH offbeat AND python]
set -euo pipefail
bin=$(cd "${1:-.venv/bin}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
[ "$(id -u)" = 0 ] && ip netns add offbeat-pod-probe 2> /dev/null || {
  echo "Kubernetes: not tested, since network namespaces cannot be made here" >&2; exit 0; }
ip netns del offbeat-pod-probe
dir=$(mktemp -d)
pods="offbeat-pod-0 offbeat-pod-1"
clean() {
  kill $(jobs -p) 2> /dev/null || true
  wait
  for pod in $pods; do ip netns del "$pod" 2> /dev/null || true; rm -rf "/etc/netns/$pod"; done
  rm -rf "$dir"
}
trap clean EXIT
trap 'exit 1' INT TERM

"$bin/python" - "$root/examples/clusters/indexed-job.yaml" > "$dir/command" 2> "$dir/ports" << 'READ'
import sys, yaml
documents = list(yaml.safe_load_all(open(sys.argv[1])))
(job,) = [one for one in documents if one["kind"] == "Job"]
(policy,) = [one for one in documents if one["kind"] == "NetworkPolicy"]
pod = job["spec"]["template"]["spec"]
print(pod["containers"][0]["args"][0].replace("--nodes 4", "--nodes 2"))
(admitted,) = policy["spec"]["ingress"][0]["ports"]
print(pod["securityContext"]["sysctls"][0]["value"], admitted["port"], admitted["endPort"], file=sys.stderr)
READ
read -r first last least most < "$dir/ports"
for pod in $pods; do
  ip netns add "$pod"
  mkdir -p "/etc/netns/$pod"
  printf '127.0.0.1 localhost\n10.88.0.1 train-0.train train-0\n10.88.0.2 train-1.train train-1\n' > "/etc/netns/$pod/hosts"
done
ip link add veth0 netns offbeat-pod-0 type veth peer name veth0 netns offbeat-pod-1
for number in 0 1; do
  pod=offbeat-pod-$number
  ip -n $pod addr add 10.88.0.$((number + 1))/24 dev veth0
  ip -n $pod link set lo up
  ip -n $pod link set veth0 up
  ip netns exec $pod sysctl -qw net.ipv4.ip_local_port_range="$first $last"
  if command -v nft > /dev/null; then
    ip netns exec $pod nft -f - << RULES || echo "note: the NetworkPolicy was not imitated" >&2
table inet pod { chain input { type filter hook input priority 0; policy drop;
  iif lo accept; ct state established,related accept; icmp type echo-request accept; tcp dport $least-$most accept; } }
RULES
  else
    echo "note: nft is not there, and the NetworkPolicy was not imitated" >&2
  fi
done
secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
for number in 0 1; do
  mkdir "$dir/$number"
  cp "$root/examples/digits_ddp.py" "$dir/$number/train.py"
  (cd "$dir/$number" && PATH="$bin:$PATH" OMP_NUM_THREADS=1 OFFBEAT_RUN_SECRET=$secret JOB_COMPLETION_INDEX=$number \
    timeout 300 ip netns exec offbeat-pod-$number sh -c "$(cat "$dir/command")") > "$dir/$number/log" 2>&1 &
  workers="${workers:-} $!"
done
for worker in $workers; do wait "$worker" || { cat "$dir"/*/log; exit 1; }; done
grep -q 'accuracy 0\.9' "$dir/0/log"
echo "Kubernetes: the manifest's command trained in two network namespaces that stand for pods"
