"""Tasks with boxes or segments."""
