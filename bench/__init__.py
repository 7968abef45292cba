"""Benches of speed and memory against eager PyTorch, torch.compile and inplace_abn: ``pytest bench/``."""
