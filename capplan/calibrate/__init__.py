"""Fitted numbers of op costs, from measured tables."""
