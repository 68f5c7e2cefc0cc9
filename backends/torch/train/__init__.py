"""Training in PyTorch: trainers, critics, optimizers, FSDP2."""
