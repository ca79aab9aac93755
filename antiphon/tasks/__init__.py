"""Tasks: prompts, environments and rewards."""
