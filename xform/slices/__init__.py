"""Find regions of a program that can run in slices along an axis, and run them so.

`ends` says for each primitive where the axes of its operands end, and `slicing` how an equation
runs on a slice. `nested` does that for loops and branches, `custom_rules` for functions with custom
derivatives, both with the data of `bodies`. `sums` finds sums over the slices in a body, `opened`
opens calls, and `batched_indices` marks the batch axes of gathers. `shards` has the slices of
values that are sharded over devices. `grow` finds the largest region around a value, and `region`
describes it. `resize` runs one equation on a slice, `draws` draws random bits of a slice,
`custom_calls` runs a function with a custom derivative, and `loop` runs a region as a scan over
slices. `rewrite` puts the loop into the program. `candidates` proposes regions and numbers of
slices, and `decision` holds a choice as plain data.
"""
