"""The wire: connections, receive stamps, HTTP framing. The measuring path; no I/O library of others."""
