"""Facts about functions (`callables`), loaded modules, Equinox modules, and installed packages."""
