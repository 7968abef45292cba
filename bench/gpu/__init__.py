"""Benches and tools that only a session on a GPU needs; README.md lists them."""
