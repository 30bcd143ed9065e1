# Starts Mooncake's master ($1, with its log in the folder $2) in a network that has only a loopback, and then the command that follows.
master=$1 log=$2
shift 2
ip link set lo up
"$master" --rpc_address=127.0.0.1 --rpc_port=50051 --metrics_host=127.0.0.1 --metrics_port=9003 --log_dir="$log" &
for _ in $(seq 300); do ss -ltn | grep -q 127.0.0.1:50051 && break; sleep 0.1; done
exec "$@"
