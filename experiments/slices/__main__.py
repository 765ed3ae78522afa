"""Run the experiment."""

from experiments.slices.run import main

if __name__ == "__main__":
    main()
