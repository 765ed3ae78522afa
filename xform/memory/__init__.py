"""Where memory goes: what the compiler reports, and what a backward pass keeps."""
