"""What a program costs on an NVIDIA GPU that is not there, by XLA's compiler for CUDA."""
