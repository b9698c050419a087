"""The reference model: plain modules for training, gate fitting and as the yardstick of the serving kernels."""
