"""``python -m examples.demo`` trains a network of stock modules and one of fused modules on real images.

slices.py, volume.py, encoders.py   the problems: images, network, batches
mni152.py                           the images, which the nilearn wheel contains, so that nothing is downloaded
training.py                         trains both from the same weights on the same batches; scores and bytes
report.py, picture.py               the printed figures and the written files
"""

from .run import run

__all__ = ["run"]
