"""The recompute scope, above the ops: they know ``ops/observer.py`` only.

scope.py       fusedseg.recompute, the context manager
watch.py       the function mode that sees each call of a function, and the tensors that the call writes to
stock.py       the rules for PyTorch's functions (stock_conv.py has that of convolutions)
recipes.py     how these rules record recipes; ops/observer.py has the contract with the ops of this package
registry.py    the live tensors: which are kept, and which have a recipe (memory.py, offers.py, plain.py)
saved.py       the objects that the graph holds in place of tensors, and the way back to the tensors
compiled.py    the same scope in compiled code, by the labels of ops/labels.py
joins.py       notes about the sources of a concatenation, for the convolution that reads it
calls.py       a call without its tensors, which can be made again with other tensors
"""
