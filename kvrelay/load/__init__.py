"""The load generator: plans jobs, sends them and summarises the responses."""
