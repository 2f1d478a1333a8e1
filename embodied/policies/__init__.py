"""Brains: what turns observations into actions, and knows how likely an action was."""
