"""Users of your own, with your own prompts, pauses and endpoints, timed as exactly as a burst.

loadgen ui --server vllm --locustfile examples/locustfile.py      or:  locust -f examples/locustfile.py --server vllm
"""

from loadgen.interactive.user import LoadgenUser, between, task


class Reader(LoadgenUser):
    """Mostly asks a question of a chat, and now and then sends a long prompt from the start form."""

    wait_time = between(0.2, 1.0)

    @task(4)
    def question(self) -> None:
        """A short question to the chat endpoint."""
        self.ask("What does a load generator measure?", output_tokens=32, endpoint="chat")

    @task(1)
    def document(self) -> None:
        """The next prompt of the start form, to the server's native endpoint."""
        self.ask()
