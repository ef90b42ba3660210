"""Measured results of other people's benchmarks, read into records that can be set beside a prediction."""
