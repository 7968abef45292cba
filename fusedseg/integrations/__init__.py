"""What other packages need to train with fusedseg.  Each module is imported on demand, and needs its own package."""
