"""Speed and memory beside eager PyTorch, torch.compile and inplace_abn: ``pytest bench/ [--device cuda]``."""
