"""What models read: text, split, shuffled, and resumable at any step."""
