"""``python -m fusedseg demo``: trains networks on real images twice, of stock modules and ours, and compares them.

slices.py, volume.py, encoders.py   what is learned: images, network, batches
mni152.py                           the images, which the nilearn wheel carries: nothing is downloaded
training.py                         both networks from the same weights, on the same batches; scores and bytes
report.py, picture.py               what is printed and written
"""

from .run import run

__all__ = ["run"]
