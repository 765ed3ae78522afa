"""Make candidates: the plans from which the planner chooses one for a budget of the peak memory."""
