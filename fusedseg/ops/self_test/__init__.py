"""The self-test of the Triton kernels at their first use.

``checks.py`` compares kernels with aten, ``verdicts.py`` keeps the results on disk, and ``first_use.py`` decides.
"""
