"""Claims from the literature about cost, memory and stability of derivatives, measured."""
