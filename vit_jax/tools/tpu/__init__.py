"""What a program costs on a TPU that is not there, by XLA's own compiler (libtpu)."""
