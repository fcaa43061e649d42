"""The small operations between matrix products and attention: one protocol and three implementations of it."""
