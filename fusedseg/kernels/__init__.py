"""Triton kernels and their launchers.  In a checkout their files are in the folder ``kernels`` at the top level.

A wheel has those files here, in place of this one (``setup.py``).
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "kernels")]
