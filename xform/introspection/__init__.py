"""What Python says of functions, modules and installed packages."""
