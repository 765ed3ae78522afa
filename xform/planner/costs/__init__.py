"""The costs of saving, offloading and recomputing values."""
