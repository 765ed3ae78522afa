"""The optimizer in the backward pass: update each parameter before the next gradient exists."""
