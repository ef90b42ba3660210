"""Discrete-event simulation of serving: requests, the engines' schedulers, KV blocks, step by step."""
