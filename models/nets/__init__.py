"""The models and their parts."""
