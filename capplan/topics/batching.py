"""Topics on batching and queues."""

from typing import Final

from capplan.formulas import memory, queueing, roofline
from capplan.topics.topic import Line, Topic, topic

_STRAGGLER: Final = (20, 600)


def _static() -> tuple[Line, ...]:
    steps = queueing.static_batch_steps(output_tokens=_STRAGGLER, slots=2)
    return (
        Line("20 and 600 tokens in one batch", steps, "step"),
        Line("of which the short one's slot idles", steps - min(_STRAGGLER), "step"),
        Line(
            "share of slot-steps that make nothing",
            queueing.static_bubble_fraction(output_tokens=_STRAGGLER),
            "1",
        ),
    )


def _continuous() -> tuple[Line, ...]:
    requests = _STRAGGLER * 4
    static = queueing.static_batch_steps(output_tokens=requests, slots=2)
    continuous = queueing.continuous_batch_steps(output_tokens=requests, slots=2)
    return (
        Line("8 requests of 20 and 600 tokens in turn, 2 slots, static", static, "step"),
        Line("continuous", continuous, "step"),
        Line("times fewer steps", static / continuous, "1"),
    )


def _queue() -> tuple[Line, ...]:
    under_way = queueing.requests_in_system(request_per_s=20, time_in_system_s=10)
    return (
        Line("20 requests/s of 10 s each: under way", under_way, "request"),
        Line("with 64 slots, waiting or refused (HTTP 429)", under_way - 64, "request"),
    )


def _cold_start() -> tuple[Line, ...]:
    size = memory.weight_bytes(parameters=70e9, bits=16)
    fast, slow = (roofline.bandwidth_bound_s(bytes_moved=size, bytes_per_s=rate) for rate in (1e9, 0.5e9))
    return (
        Line("70B in fp16 from a disk of 1.0 GB/s", fast, "s"),
        Line("from one of 0.5 GB/s", slow, "s"),
        Line(
            "requests that arrive meanwhile, at 20 a second",
            queueing.requests_in_system(request_per_s=20, time_in_system_s=fast),
            "request",
        ),
    )


BATCHING: Final[tuple[Topic, ...]] = (
    topic(
        "static-batching",
        "The straggler bubble of static batching",
        (queueing.static_bubble_fraction, queueing.static_batch_steps),
        _static,
        aliases=("straggler", "bubble", "static-batch"),
    ),
    topic(
        "continuous-batching",
        "Continuous batching: a freed slot is refilled at once",
        (queueing.continuous_batch_steps, queueing.static_batch_steps),
        _continuous,
        aliases=("iteration-level-scheduling", "in-flight-batching", "orca"),
    ),
    topic(
        "pending-queue",
        "Requests under way and waiting",
        (queueing.requests_in_system,),
        _queue,
        aliases=("queue", "little", "littles-law", "admission-control", "queue-length"),
    ),
    topic(
        "cold-start",
        "How long a new replica loads",
        (roofline.bandwidth_bound_s, queueing.requests_in_system),
        _cold_start,
        holds="reading the weights alone; provisioning, compiling and warm-up come on top.",
        aliases=("model-loading", "autoscaling"),
    ),
)
