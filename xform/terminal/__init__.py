"""What people see in a terminal: text, units, a sign of life, no noise at the start."""
