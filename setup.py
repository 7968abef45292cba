"""Packs the folder ``kernels`` as the package ``fusedseg.kernels``.  pyproject.toml has all the rest of the build.

``package-dir`` of pyproject.toml could say the same.  But then setuptools makes an editable install find the package by
an import hook, which type checkers cannot follow; now it is a plain path.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def get_package_dir(self, package: str) -> str:
        return "kernels" if package == "fusedseg.kernels" else super().get_package_dir(package)


setup(cmdclass={"build_py": BuildPy})
