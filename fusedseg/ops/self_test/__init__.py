"""The self-test of families of kernels at their first use.

Each op registers its test (``ops/registry.py``), with what tests share in ``cases.py``; ``first_use.py`` runs the tests
and decides by the results.
"""
