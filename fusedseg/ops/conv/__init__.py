"""The convolution ops: a convolution of sources, and a convolution with BatchNorm and an activation."""
