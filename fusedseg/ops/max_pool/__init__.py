"""The max-pooling op."""
