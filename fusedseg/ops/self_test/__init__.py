"""The self-test of the Triton kernels at their first use.

``checks.py`` compares kernels with aten, and ``first_use.py`` decides by the results.
"""
