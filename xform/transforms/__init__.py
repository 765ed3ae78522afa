"""The public transforms: derivatives, remat regions, plans and reports."""
