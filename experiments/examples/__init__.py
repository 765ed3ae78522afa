"""Programs of under 80 lines, each of which needs a derivative that takes some thought."""
