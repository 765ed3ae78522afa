"""The interpreters: they push programs forward, pull them back, and run them again."""
