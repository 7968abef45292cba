"""The codegen "aten": passes over a graph of forward or of backward, and the code that runs it."""
