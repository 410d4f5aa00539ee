"""What `loadgen ui` hands to Locust when nobody names another file: users who ask the prompts of the start form."""

from __future__ import annotations

from loadgen.interactive.user import LoadgenUser


class Prompts(LoadgenUser):
    """Asks one prompt after the other, without a pause."""
