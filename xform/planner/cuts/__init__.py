"""Choose the values to save, by minimum cuts and integer programs.

Both decide for a *Joint*, the forward and the backward pass of a derivative as one program.
"""
