"""Files that appear whole, and caches that cannot grow."""
