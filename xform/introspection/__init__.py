"""Facts about functions, loaded modules and installed packages."""
