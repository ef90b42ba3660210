"""A stand-in for an engine: every request is answered a fixed time after it arrives."""

import heapq
from collections.abc import Callable

from capplan.sim.request import Request, Workload


def serve(
    workload: Workload, latency_s: float, rejects: Callable[[Request], bool] = lambda request: False
) -> list[Request]:
    """All requests of `workload` in order of arrival; `rejects` are refused at once."""
    stream = workload.arrivals()
    events: list[tuple[float, int, Request]] = []
    upcoming = next(stream, None)
    served: list[Request] = []
    answers: list[tuple[float, int, Request]] = []
    while upcoming is not None or events or answers:
        arrival_s = min(
            events[0][0] if events else float("inf"), upcoming.arrival_s if upcoming else float("inf")
        )
        if answers and answers[0][0] <= arrival_s:
            now_s, _, request = heapq.heappop(answers)
            following = workload.after(request, now_s)
            if following is not None:
                assert following.arrival_s >= now_s
                heapq.heappush(events, (following.arrival_s, following.index, following))
            continue
        if upcoming is not None and upcoming.arrival_s == arrival_s:
            request, upcoming = upcoming, next(stream, None)
        else:
            request = heapq.heappop(events)[2]
        served.append(request)
        done_s = request.arrival_s
        if not rejects(request):
            request.first_token_s = request.done_s = done_s = done_s + latency_s
            request.made_tokens = request.output_tokens
        heapq.heappush(answers, (done_s, request.index, request))
    return served
