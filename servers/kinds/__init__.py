"""Every dialect by (server, endpoint), and each server's native endpoint: the one it is measured on unless asked."""

from servers.kinds import lightllm, openai, tgi, vllm
from servers.kinds.base import Dialect

DIALECTS: dict[tuple[str, str], Dialect] = {
    ("vllm", "completions"): vllm.COMPLETIONS,
    ("vllm", "chat"): vllm.CHAT,
    ("tgi", "generate"): tgi.GENERATE,
    ("tgi", "completions"): tgi.COMPLETIONS,
    ("tgi", "chat"): tgi.CHAT,
    ("lightllm", "generate"): lightllm.GENERATE,
    ("lightllm", "completions"): lightllm.COMPLETIONS,
    ("lightllm", "chat"): lightllm.CHAT,
    ("openai", "completions"): openai.COMPLETIONS,
    ("openai", "chat"): openai.CHAT,
}

NATIVE: dict[str, str] = {"vllm": "completions", "tgi": "generate", "lightllm": "generate", "openai": "completions"}
