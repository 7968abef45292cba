"""What backward reads of forward: what is kept, what is recomputed, in which order, and the bytes of it."""
