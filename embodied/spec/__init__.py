"""The ground floor: what worlds, brains, learning and reality agree on. Imports nothing of ours."""
