"""The engine of the recompute scope.

scope.py       fusedseg.recompute, the context manager
watch.py       the function mode that sees functions as they are called, and what they write to
stock.py       what the scope knows of PyTorch's functions (stock_norm.py: of batch and instance norm)
recipes.py     how an op offers a recipe for its output: the contract
registry.py    live memory: which tensors are kept, and which have a recipe (memory.py, offers.py, plain.py)
saved.py       what the graph holds in place of a tensor, and how the tensor comes back
joins.py       what a concatenation was made of, for the convolution that reads it
calls.py       a call without its tensors, to be made again with others
"""
