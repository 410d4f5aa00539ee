"""Connections, receive timestamps and HTTP framing for measured requests, without a third-party HTTP library."""
