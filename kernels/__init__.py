"""Triton kernels and their launchers, imported as ``fusedseg.kernels``: no autograd, no ``nn``, no validation."""
