"""Readers of what a model's files say: bounded, and never trusting a length."""
