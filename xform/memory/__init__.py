"""Where memory goes, as the compiler reports it."""
