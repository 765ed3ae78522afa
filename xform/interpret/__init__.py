"""The interpreters: programs pushed forward, pulled back, and emitted again."""
