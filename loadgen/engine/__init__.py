"""The engine: worker processes that send each request at its instant and record what comes back."""
