"""Choose the values to save, by minimum cuts and integer programs.

They decide for one *Joint*, the forward and the backward pass of a derivative as one program.
"""
