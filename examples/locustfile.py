"""Defines Locust users with their own prompts, pauses and endpoints. Their requests are measured as exactly as a burst.

pip install -e '.[ui]'
loadgen ui --server vllm --locustfile examples/locustfile.py      or:  locust -f examples/locustfile.py --server vllm
"""

from loadgen.interactive.user import LoadgenUser, between, task


class Reader(LoadgenUser):
    """A user who mostly asks short questions in a chat, and sometimes sends a prompt that the start form of the page
    defines.
    """

    wait_time = between(0.2, 1.0)

    @task(4)
    def question(self) -> None:
        """Send a short question to the chat endpoint."""
        self.ask("What does a load generator measure?", output_tokens=32, endpoint="chat")

    @task(1)
    def document(self) -> None:
        """Send the next prompt of the page's start form to the server's default endpoint."""
        self.ask()
