"""Examples of the commands. The help of each command shows one example."""

EXAMPLES = {
    "burst": "loadgen burst --url http://127.0.0.1:8000 --n 1000",
    "run": "loadgen run --url http://127.0.0.1:8000 --rate 5 --duration 30s",
    "sweep": "loadgen sweep --url http://127.0.0.1:8000 --objective 'ttft.p99 < 1s'",
    "matrix": "loadgen matrix matrix.toml",
    "ui": "loadgen ui --url http://127.0.0.1:8000",
    "worker": "loadgen worker --master 10.0.0.1:5557",
    "servers": "loadgen servers up --server vllm --model llama-2-7b",
    "anonymise": "loadgen anonymise requests.jsonl --out trace.jsonl",
    "report": "loadgen report runs/A",
    "compare": "loadgen compare runs/A runs/B",
    "export": "loadgen export runs/A --csv tables",
    "calibrate": "loadgen calibrate --quick",
    "dissect": "loadgen dissect inference --model llama-2-7b --layers 2",
    "simulate": "loadgen simulate --server vllm --gpu H100 --rate 20 --n 500",
    "limits": "loadgen limits --gpu H100 --model llama-3-8b",
    "hardware": "loadgen hardware sweep --gpu A100 --technology 7nm..1nm",
    "hardware sweep": "loadgen hardware sweep --gpu A100 --technology 7nm..1nm",
    "hardware compare": "loadgen hardware compare A100 B200 --model llama-3.1-8b",
    "hardware bounds": "loadgen hardware bounds --gpus A100,H100 --batch 64",
    "twin": "loadgen twin fit runs/A runs/B --out twin.json",
    "plan-capacity": "loadgen plan-capacity --rate 50 --objective 'ttft.p99 < 1s'",
    "mock-server": "loadgen mock-server --server vllm --port 8000",
}
"""One command line per command, for the end of its help."""
