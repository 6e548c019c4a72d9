#!/usr/bin/env bash
# Two emulated hosts, each with a supervisor for its workers; the second one is cut off for a while.
# Needs root: it makes two network namespaces, and removes them again.
#
#     examples/two_hosts.sh [SECONDS WITHOUT A LINK]
set -euo pipefail
cd "$(dirname "$0")"
without=${1:-15}
offbeat=${OFFBEAT:-offbeat}
name=offbeat-hosts-$$
out=$(mktemp -d)
touch "$out/a.log"

clean() {
  kill $(jobs -p) 2> /dev/null || true
  wait
  ip netns del "$name-a" 2> /dev/null || true
  ip netns del "$name-b" 2> /dev/null || true
}
trap clean EXIT
trap 'exit 1' INT TERM

ip netns add "$name-a"
ip netns add "$name-b"
ip link add veth-a netns "$name-a" type veth peer name veth-b netns "$name-b"
ip -n "$name-a" addr add 10.87.0.1/24 dev veth-a
ip -n "$name-b" addr add 10.87.0.2/24 dev veth-b
for side in a b; do
  ip -n "$name-$side" link set lo up
  ip -n "$name-$side" link set "veth-$side" up
done

# Silence is tolerated for 5 s here, so that the cut shows soon; the default is longer.
run() {
  OFFBEAT_SILENCE_S=5 ip netns exec "$name-$1" "$offbeat" run --strategy wagma --restarts 3 \
    --rendezvous 10.87.0.1:29500 --nodes 2 --node-rank "$2" --workers "$3" --out "$out/$1" \
    digits_ddp.py --epochs "${EPOCHS:-4000}" --width 64
}
run a 0 2 2>&1 | sed -u "s/^/a: /" | tee "$out/a.log" &
run b 1 1 2>&1 | sed -u "s/^/b: /" &
until grep -q "epoch 20," "$out/a.log"; do sleep 1; done
echo "-- b is cut off"
ip -n "$name-b" link set veth-b down
sleep "$without"
echo "-- b is back"
ip -n "$name-b" link set veth-b up
wait
