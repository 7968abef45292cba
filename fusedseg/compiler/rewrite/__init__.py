"""Passes over the joint graph of forward and backward that need no decision about what is kept."""
