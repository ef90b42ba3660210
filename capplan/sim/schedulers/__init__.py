"""The engines' schedulers: one function each, which fills the next step from a replica's queues."""
