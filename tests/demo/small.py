"""``python -m tests.demo.small``: the demo ``slices`` with a small image and network, for tests of it as a program."""

import dataclasses
import sys

from examples.demo import slices, training
from examples.demo.__main__ import main

if __name__ == "__main__":
    slices.SIZES["cpu"] = dataclasses.replace(slices.SIZES["cpu"], resolution=4, widths=(2, 4), batch=2)
    training.SETTLED_BATCHES = 2
    sys.exit(main())
