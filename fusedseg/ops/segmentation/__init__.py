"""The op of the losses and metrics of segmentation: sums per sample and class of logits and labels."""
