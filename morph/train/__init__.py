"""Training of the SSM mixers: alignment with attention block by block, then distillation under sampled layouts."""
