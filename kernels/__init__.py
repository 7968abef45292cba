"""Triton kernels and their launchers, imported as ``fusedseg.kernels``.  They have no autograd and no validation."""
