"""The content of requests, and the times at which they are sent."""
