"""Publishes a model on the Hugging Face Hub: see __main__."""
