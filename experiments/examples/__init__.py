"""Programs of under 80 lines, each with a derivative that takes some thought."""
