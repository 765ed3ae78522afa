"""What texts claim of the cost, memory and stability of derivatives, measured."""
