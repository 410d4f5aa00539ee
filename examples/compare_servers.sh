#!/bin/sh
# Sends the same burst to vLLM, TGI, LightLLM and SGLang. Prints one line for each: output tokens per second, p50 and p99 of TTFT.
#
#   examples/compare_servers.sh --n 1000 --input-tokens 512 --output-tokens 128
#
# All options are passed to `loadgen burst`. A server that is not running is simulated, and its line says so; --real forbids this.
set -eu

for server in vllm tgi lightllm sglang; do
    loadgen burst --server "$server" --json "$@" | python3 -c '
import json, sys
summary = json.load(sys.stdin)
server, first_token = summary["server"], summary["latency"]["ttft_s"]
name = server["name"] + (" (SIMULATED)" if server["simulated"] else "")
rate, p50, p99 = summary["throughput"]["output_tokens_per_s"], first_token["p50"], first_token["p99"]
print(f"{name:22} {rate:10.0f} tokens/s   TTFT p50 {p50:.3f} s   p99 {p99:.3f} s")
'
done
