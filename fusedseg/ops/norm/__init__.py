"""The norm op: BatchNorm, InstanceNorm and GroupNorm with a residual and an activation."""
