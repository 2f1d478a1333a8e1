"""`embodied deploy ...`: one module a command; each reads its own few options."""
