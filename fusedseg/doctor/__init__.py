"""``fusedseg doctor``: ``report.py`` describes the installation, ``gpu.py`` tests the kernels on GPUs."""

from .report import doctor as doctor
