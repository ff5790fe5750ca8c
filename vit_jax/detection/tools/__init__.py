"""Detection's part of the commands."""
