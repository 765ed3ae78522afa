"""Find regions of a program that can run in slices along an axis, and run them so.

`ends` says for each primitive where the axes of its operands end, and `slicing` how an equation
runs on a slice. `nested` does that for calls, loops and branches, and `opened` opens calls. `grow`
finds the largest region around a value, and `region` describes it. `resize` runs one equation on a
slice, and `loop` runs a region as a scan over slices. `rewrite` puts the loop into the program.
`candidates` proposes regions and numbers of slices, and `decision` holds a choice as plain data.
"""
