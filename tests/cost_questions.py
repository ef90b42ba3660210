"""A price book and a model's speed for tests of cost, apart from the shipped rows and calibrations."""

import datetime
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from capplan.cost_estimate import CostEstimate, cost
from capplan.prices import PriceBook, Provider
from capplan.specs import Price

TODAY = datetime.date(2026, 11, 30)
GPU = "h100-sxm-80gb"


def price(usd: float, **fields: Any) -> Price:
    """One GPU on demand, read today."""
    values: dict[str, Any] = {
        "gpu_id": GPU,
        "cloud": "some",
        "instance": "1x",
        "gpu_count": 1,
        "region": "us-1",
        "term": "on-demand",
        "usd_per_hour": usd,
        "read_on": TODAY.isoformat(),
        "source": "list",
    }
    return Price(**(values | fields))


BOOK = PriceBook(
    [
        price(2.0),
        price(1.0, term="spot"),
        price(1.5, term="1yr"),
        price(24.0, cloud="nodes", instance="8x", gpu_count=8),
    ],
    {"some": Provider(id="some", name="Some", areas={}, sources={"list": "a list"})},
)


def asked(**fields: Any) -> CostEstimate:
    """The answer about an H100 fleet on the book above."""
    values: dict[str, Any] = {"gpu": GPU, "prices": BOOK, "today": TODAY}
    return cost(**(values | fields))


@dataclass
class FakeLatency:
    """In place of latency_estimate.latency: a replica that makes `users` · 100 tokens/s, up to 8 users.

    `asked` keeps the questions; TPOT is 10 ms a user.
    """

    asked: list[dict[str, Any]]
    fits: bool = True
    stable_request_per_s: float = 4.0
    tpot_limit_s: float = 0.05

    def __call__(self, model: str, **fields: Any) -> SimpleNamespace:
        self.asked.append({"model": model, **fields})
        users = fields.get("concurrency") or 1
        rate = fields.get("request_per_s")
        speed = 100.0 * min(users, 8)
        limit = self.tpot_limit_s if fields.get("slo") else None
        points = [
            SimpleNamespace(
                users=each,
                tpot_s=0.01 * each,
                output_token_per_s=100.0 * min(each, 8) + (1.0 if each > 8 else 0.0),
                meets=None if limit is None else 0.01 * each <= limit,
            )
            for each in (1, 2, 4, 8, 16)
        ]
        served = SimpleNamespace(
            prefill_share=0.2,
            steady=rate is None or rate < self.stable_request_per_s,
            utilization=0.0 if rate is None else rate / self.stable_request_per_s,
            stable_request_per_s=self.stable_request_per_s,
        )
        return SimpleNamespace(
            fits=self.fits,
            model=SimpleNamespace(name="a model"),
            gpu=SimpleNamespace(name="a GPU"),
            throughput=SimpleNamespace(
                estimate=speed, low=0.8 * speed, high=1.25 * speed, provenance="estimate"
            ),
            served=served,
            sweep=points,
            notes=("of the speed",),
        )
