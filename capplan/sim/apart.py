"""One run with prompts on a replica of their own: both replicas, the link between them, both records."""

from capplan.sim import disaggregated
from capplan.sim.disaggregated import Link, Stage, Transfers
from capplan.sim.flow import Scheduler, StepTimes
from capplan.sim.metrics import Metrics
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request, Workload
from capplan.sim.summary import Apart, Summary, spread_of, usage_of


class PromptRecord:
    """The Recorder of the replica of prompts; requests that end there are told to the other's."""

    def __init__(self, own: Metrics, decode: Metrics) -> None:
        self.own, self.decode = own, decode

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """`count` steps alike have passed."""
        self.own.steps(replica, step, count, start_s, end_s, [])
        for request in done:
            self.decode.keep(request)

    def rejected(self, request: Request, now_s: float) -> None:
        """A request that could never be served."""
        self.decode.rejected(request, now_s)


class ApartRun:
    """Two empty replicas of the same limits, with `schedulers` of their own: prompts first, then decoding.

    `prompts` and `metrics` are their records, all requests in the latter.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        schedulers: tuple[Scheduler, Scheduler],
        times: StepTimes,
        prompts: Metrics,
        metrics: Metrics,
    ) -> None:
        self.prompts, self.metrics, self.transfers = prompts, metrics, Transfers()
        self.prefill = Stage(Replica(limits), schedulers[0], times, PromptRecord(prompts, metrics))
        self.decode = Stage(Replica(limits), schedulers[1], times, metrics)

    def serve(self, workload: Workload, link: Link) -> None:
        """Serve the whole workload."""
        disaggregated.run(
            workload=workload, prefill=self.prefill, decode=self.decode, link=link, transfers=self.transfers
        )

    @property
    def left(self) -> int:
        """Requests that wait or run on either replica, or are between them."""
        return self.prefill.under_way + self.transfers.under_way + self.decode.under_way

    def close(self) -> None:
        """Both records end with the last step of either."""
        self.metrics.close()
        self.prompts.close()
        self.metrics.end_s = self.prompts.end_s = max(self.metrics.end_s, self.prompts.end_s)

    def seen(self, summary: Summary) -> Apart:
        """What the summary of the requests does not say; after `close`."""
        import numpy as np

        waits = [
            seconds for arrival_s, seconds in self.transfers.moved if arrival_s >= summary.window.start_s
        ]
        e2e, end_s = summary.spreads["e2e_s"], max(self.prompts.end_s, 1e-12)
        line = self.prompts.timeline
        bins = line.bins_between(0.0, end_s)
        whole_s = 0.0 if e2e is None else e2e.mean * summary.measured
        return Apart(
            transfer_s=spread_of(np.array(waits)) if waits else None,
            transfer_share=min(1.0, sum(waits) / whole_s) if whole_s else 0.0,
            link_busy=min(1.0, self.transfers.busy_s / end_s),
            prefill_busy=min(1.0, line.sum_of("busy_s", bins) / end_s),
            prefill_kv_usage=usage_of(self.prompts, bins, end_s),
            prefill_preemptions=self.prompts.preemptions,
        )
