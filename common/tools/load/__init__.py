"""The load generator: what to send, sending it, and what the answers amount to."""
