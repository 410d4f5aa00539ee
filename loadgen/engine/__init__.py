"""The measuring engine: worker processes send each request when it is due, and record the response."""
