"""Make candidates: the plans among which a budget of the peak memory chooses."""
