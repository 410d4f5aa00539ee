"""The entry point of a stand-in: the real server's arguments in, the simulated server out."""

import os
import sys
import time
from pathlib import Path

MODEL = {"tgi": "--model-id", "tei": "--model-id", "lightllm": "--model_dir", "sglang": "--model-path"}
LENGTH = {
    "vllm": "--max-model-len",
    "tgi": "--max-total-tokens",
    "lightllm": "--max_req_total_len",
    "sglang": "--context-length",
}
LIMIT = {"tgi": "--max-concurrent-requests", "tei": "--max-concurrent-requests", "lightllm": "--running_max_req_size"}

package = (__package__ or "").partition(".")[0]  # `lightllm` or `sglang`, if the image has no entry point
server, *words = [package, *sys.argv[1:]] if package else sys.argv[1:]
given = dict(word.partition("=")[::2] for word in words)
model = Path(given[MODEL[server]] if server in MODEL else words[0])  # `vllm serve MODEL` takes it as its first word
print("arguments:", *words, flush=True)
if not model.is_dir():
    sys.exit(f"OSError: {model} does not appear to have a file named config.json.")
if model.name == "slow":  # loads for ever, and like many a server handles no signal
    time.sleep(1e6)
port = given.get("--port", "80")
limit = [f"--max-concurrent-requests={given[LIMIT[server]]}"] if server in LIMIT else []
length = given[LENGTH[server]] if server in LENGTH else "4096"
served = ["--clock=batching", f"--model={model.name}", f"--max-model-len={length}", *limit]
os.execvp("loadgen", ["loadgen", "mock-server", f"--server={server}", "--host=0.0.0.0", f"--port={port}", *served])
