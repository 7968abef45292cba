"""The hunt: random programs run in eager mode and compiled, random networks stock and through ``convert``.

* ``prelude.py`` holds what a printed program needs: the log of its results, odd functions, the comparison.
* ``program.py`` holds a program as data, and prints it as code that runs in a checkout.
* ``grow.py`` makes a program of a seed.  It runs each step in eager mode at once, so that it knows shapes and dtypes.
* ``steps.py``, ``layers.py``, ``habits.py`` and ``blocks.py`` hold the steps that it chooses from.
* ``networks.py`` makes a module of a seed, for ``fusedseg.convert``.
* ``compiled.py`` makes functions of programs, and networks, for ``torch.compile(backend="fusedseg")``.
* ``pieces.py`` makes networks of the compiler's table of ops, and of pieces of networks and losses, for the option
  "bits"; ``rounding.py`` judges their gradients beside a reference.
* ``judge.py`` runs a program and gives the verdict; it drops steps from a program that fails.
* ``crew.py`` runs seeds in processes of their own; ``python -m tests.hunt --help`` is its command line.
"""
