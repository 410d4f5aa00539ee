"""Defines users with their own prompts, pauses and endpoints, measured as exactly as a burst.

pip install -e '.[ui]'
loadgen ui --server vllm --locustfile examples/locustfile.py      or:  locust -f examples/locustfile.py --server vllm
"""

from loadgen.interactive.user import LoadgenUser, between, task


class Reader(LoadgenUser):
    """A user who mostly asks short questions in a chat, and sometimes sends a prompt of the start form."""

    wait_time = between(0.2, 1.0)

    @task(4)
    def question(self) -> None:
        """Send a short question to the chat endpoint."""
        self.ask("What does a load generator measure?", output_tokens=32, endpoint="chat")

    @task(1)
    def document(self) -> None:
        """Send the next prompt of the start form to the server's default endpoint."""
        self.ask()
