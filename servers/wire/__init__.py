"""The measuring path: connections, receive timestamps and HTTP framing, without a third-party I/O library."""
