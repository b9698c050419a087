"""`morph demo`: real prompts of different kinds, side by side, each with the layout that the gates chose."""
