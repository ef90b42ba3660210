"""What is not data about an engine: its memory rules, its launch command; one file an engine."""
