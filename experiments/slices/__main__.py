"""Run the experiment."""

from experiments.slices.run import main

main()
