"""nnU-Net finds the trainers in this folder by the environment variable ``nnUNet_extTrainer``."""
