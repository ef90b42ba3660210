"""A question about money → its answer: line items of a month, and what tokens, requests and users cost.

`cost(...)` is what `capplan cost` prints and what scripts call. Prices are prices.py's, ownership is
ownership.py's, tokens per second are latency.py's or measured.
"""

from collections.abc import Iterator
from typing import Any

from capplan import catalog, local_calibration, ownership, price_cache, price_choice, schedule, tco
from capplan.cost_answer import BreakEven, CostEstimate, Energy, Option, Tokens
from capplan.cost_question import WAYS, CostQuestion, Way, billed_hours, check
from capplan.cost_speed import speed_of
from capplan.errors import InputError
from capplan.formulas import cost as formulas
from capplan.ownership import LineItem, Power
from capplan.price_choice import Quote
from capplan.prices import PriceBook
from capplan.specs import Gpu
from capplan.units import MONTH_HOURS


def cost(gpu: str = "", *, prices: PriceBook | None = None, **fields: Any) -> CostEstimate:
    """What a fleet costs a month; the fields are CostQuestion's.

    `prices` are the rows to choose from: the shipped ones where nothing is given. Ages are counted from
    `today`, the computer's date where it is not given. Raises InputError for a question that cannot be
    answered, an unknown price included.
    Example: cost("h100", gpus=4, price_usd_per_gpu_hour=2.49).usd_per_month
    """
    return answer(CostQuestion(gpu=gpu, **fields), prices or price_cache.load())


def answer(question: CostQuestion, book: PriceBook) -> CostEstimate:
    """The answer to a question."""
    check(question)
    return _Bill(question, book).estimate()


def _device(question: CostQuestion) -> Gpu:
    """The GPU that is paid for: the one named, else the one of the profile. Raises InputError without one."""
    if question.gpu:
        return catalog.gpu(question.gpu)
    if question.profile == "auto":
        raise InputError("on which GPU?", where="--gpu", hint="--gpu h100, or --profile FILE for its device")
    return local_calibration.of_device(question.profile, None).gpu


class _Bill:
    """One question's fleet, prices and hours."""

    def __init__(self, question: CostQuestion, book: PriceBook) -> None:
        self.question, self.book = question, book
        self.gpu = _device(question)
        self.gpus = question.fleet_gpus
        self.hours = billed_hours(question)
        diurnal = None if question.diurnal is None else schedule.parse_diurnal(question.diurnal)
        self.running = 1.0 if diurnal is None else schedule.running_share(diurnal, question.replicas)
        self.load_share = 1.0 if diurnal is None else sum(diurnal) / len(diurnal)
        self.owned = ownership.own(self.gpu, gpus=self.gpus, given=question.own, watts=question.watts)
        self.quote = self._asked_price()
        self.speed = speed_of(question)

    def _asked_price(self) -> Quote | None:
        """The price of the term asked for; InputError where there is none: unpriced is not free."""
        question = self.question
        if question.term == "owned":
            if self.owned is None:
                raise InputError(
                    f"no purchase price of {self.gpu.id} is known",
                    where="--term owned",
                    hint="--own purchase_usd_per_gpu=USD (and server_watts_per_gpu=W where no TDP is known)",
                )
            return None
        if question.price_usd_per_gpu_hour is not None:
            return price_choice.given(question.price_usd_per_gpu_hour, question.term)
        found = self.price_of(question.term)
        if found is None:
            raise price_choice.missing(
                self.book, self.gpu.id, term=question.term, cloud=question.cloud, region=question.region
            )
        return found

    def price_of(self, way: Way) -> Quote | None:
        """The price under a term, where the question looks for prices."""
        if way == "owned":
            return None
        return price_choice.choose(
            self.book,
            self.gpu.id,
            term=way,
            today=self.question.day,
            cloud=self.question.cloud,
            region=self.question.region,
            gpus=self.gpus,
        )

    def hours_of(self, way: Way) -> float:
        """Hours for which each GPU of the fleet is paid: a commitment runs all month."""
        return self.hours * self.running if way in ("on-demand", "spot") else MONTH_HOURS

    def items(self, way: Way, quote: Quote | None) -> list[LineItem]:
        """The bill of a month."""
        if quote is None:
            return list(self.owned.items) if self.owned is not None else []
        hours, rate = self.hours_of(way), quote.usd_per_gpu_hour
        hourly = f"{self.gpus:,} × {hours:,.6g} h"
        made = [self._gpu_hours(f"GPUs, {way}", self.gpus * hours, rate, hourly)]
        spare = quote.billed_gpus(self.gpus) - self.gpus
        if spare:
            note = f"{spare} GPUs: nodes have {quote.node_gpus}"
            made.append(self._gpu_hours("left over in nodes", spare * hours, rate, note))
        if way == "spot" and self.question.spot_reserve:
            reserve = self.question.spot_reserve
            spares = formulas.spare_gpu_hours(gpu_hours=self.gpus * hours, reserve=reserve)
            made.append(self._gpu_hours("reserve for interruptions", spares, rate, f"{reserve:.0%} spare"))
        return made

    def _gpu_hours(self, name: str, gpu_hours: float, rate: float, note: str) -> LineItem:
        return LineItem(name=name, quantity=gpu_hours, unit="GPU-hour", usd_per_unit=rate, note=note)

    def estimate(self) -> CostEstimate:
        """The whole answer."""
        question = self.question
        items = self.items(question.term, self.quote)
        usd = sum(item.usd for item in items)
        billed = self.gpus if self.quote is None else self.quote.billed_gpus(self.gpus)
        gpu_hours = billed * self.hours_of(question.term)
        busy = question.utilization * self.load_share * self.gpus * self.hours / gpu_hours
        if self.speed is not None:
            busy *= self.speed.busy
        tokens = self.tokens(usd)
        return CostEstimate(
            question=question,
            gpu=self.gpu,
            price=self.quote,
            line_items=tuple(items),
            gpus_billed=billed,
            gpu_hours=gpu_hours,
            hours=self.hours,
            busy=min(1.0, busy),
            speed=self.speed,
            tokens=tokens,
            by_utilization=self.by_utilization(usd),
            usd_per_user_month=self.per_user(usd, tokens),
            options=tuple(self.options()),
            ownership=self.owned,
            break_even=self.break_even(usd, tokens),
            energy=self.energy(),
            notes=tuple(self.notes()),
        )

    def output_tokens(self, utilization: float) -> float | None:
        """Output tokens of a month."""
        if self.speed is None:
            return None
        return formulas.tokens_served(
            token_per_s=self.speed.output_token_per_s,
            hours=self.hours,
            utilization=utilization * self.load_share,
        )

    def tokens(self, usd: float) -> Tokens | None:
        """Cost of tokens: prompt tokens carry the time of prefill, output tokens the rest."""
        made = self.output_tokens(self.question.utilization)
        if made is None or self.speed is None:
            return None
        lengths, share = self.question.lengths, self.speed.prefill_share
        prompts = None if lengths is None else made * lengths[0] / lengths[1]
        requests = None if lengths is None else made / lengths[1]

        def per_million(part: float, tokens: float) -> float:
            return formulas.share_usd_per_million_token(usd=usd, share=part, tokens=tokens)

        return Tokens(
            output=made,
            input=prompts,
            requests=requests,
            prefill_share=share,
            usd_per_million_output=per_million(1.0 - (share or 0.0), made),
            usd_per_million_input=None if prompts is None or share is None else per_million(share, prompts),
            usd_per_million_blended=None if prompts is None else per_million(1.0, made + prompts),
            usd_per_million_output_alone=per_million(1.0, made),
            usd_per_request=None if requests is None else usd / requests,
        )

    def by_utilization(self, usd: float) -> dict[float, float]:
        """Cost of a million output tokens at full load and at published utilizations; the bill stays."""
        if self.speed is None or self.question.request_per_s is not None:
            return {}
        typical = tco.load().figures["fleet_utilization"]
        made = {}
        for part in (1.0, typical.high, typical.typical, typical.low):
            tokens = self.output_tokens(part) or 1.0
            share = 1.0 - (self.speed.prefill_share or 0.0)
            made[part] = formulas.share_usd_per_million_token(usd=usd, share=share, tokens=tokens)
        return made

    def per_user(self, usd: float, tokens: Tokens | None) -> float | None:
        """Cost of a user a month: of the users named, by their requests, or of those at work at once."""
        question = self.question
        if question.users is not None:
            return usd / question.users
        if question.requests_per_user_day is not None and tokens is not None and tokens.usd_per_request:
            return tokens.usd_per_request * question.requests_per_user_day * MONTH_HOURS / 24
        if self.speed is not None and self.speed.users:
            return usd / self.speed.users
        return None

    def options(self) -> Iterator[Option]:
        """The same fleet under every way to pay."""
        for way in WAYS:
            asked = way == self.question.term
            quote = self.quote if asked else self.price_of(way)
            items = self.items(way, quote) if quote is not None or way == "owned" else []
            if not items:
                yield Option(way=way)
                continue
            usd = sum(item.usd for item in items)
            tokens = self.tokens(usd)
            yield Option(
                way=way,
                usd_per_gpu_hour=quote.usd_per_gpu_hour if quote else usd / (self.gpus * MONTH_HOURS),
                usd_per_month=usd,
                usd_per_million_output_token=None if tokens is None else tokens.usd_per_million_output,
                price=quote,
            )

    def break_even(self, usd: float, tokens: Tokens | None) -> BreakEven:
        """Renting against owning, and both against an API."""
        question, owned = self.question, self.owned
        quote = self.quote or self.price_of("on-demand")
        way: Way = question.term if self.quote is not None else "on-demand"
        months = rent_hours = None
        if quote is not None and owned is not None:
            rent = sum(item.usd for item in self.items(way, quote))
            months = formulas.break_even_months(
                purchase_usd=owned.purchase_usd, rent_usd=rent, running_usd=owned.running_usd
            )
            rent_hours = owned.usd_per_month / (quote.billed_gpus(self.gpus) * quote.usd_per_gpu_hour)
        api: dict[str, float | None] = {}
        if question.api_price_output is not None and tokens is not None:
            api = self.against_api(usd, tokens, question.api_price_output)
        return BreakEven(own_months=months, rent_hours_per_month=rent_hours, **api)

    def against_api(self, usd: float, tokens: Tokens, output_usd: float) -> dict[str, float | None]:
        """The same tokens at an API's prices; without its price of prompts, output tokens alone."""
        lengths, input_usd = self.question.lengths, self.question.api_price_input
        if lengths is None or input_usd is None:
            price, served = output_usd, tokens.output
        else:
            price = formulas.blended_usd_per_million(
                input_usd=input_usd, output_usd=output_usd, isl=lengths[0], osl=lengths[1]
            )
            served = tokens.output + (tokens.input or 0.0)
        needed = formulas.break_even_tokens(usd=usd, usd_per_million=price)
        # `served` is at the question's utilization: what the fleet could serve is that much more.
        capacity = served / (self.question.utilization * (self.speed.busy if self.speed else 1.0))
        return {
            "api_usd_per_million": price,
            "api_usd_per_month": formulas.token_price_usd(tokens=served, usd_per_million=price),
            "api_tokens_per_month": needed,
            "api_utilization": needed / capacity,
        }

    def energy(self) -> Energy | None:
        """Energy of the GPUs wanted; None where neither watts nor a TDP are known."""
        question = self.question
        pue = question.own.get("pue", tco.load().figures["pue"].typical)
        if question.term == "owned" and self.owned is not None:
            power, pue = self.owned.power, self.owned.pue
        elif question.watts is not None:
            power = Power(watts=question.watts, provenance="measured")
        elif self.gpu.tdp_w is not None:
            power = Power(watts=self.gpu.tdp_w, provenance="tdp")
        else:
            return None
        hours = self.gpus * self.hours_of(question.term)
        facility = formulas.energy_kwh(watts=power.watts, hours=hours, pue=pue)
        grid = question.grid_gco2_per_kwh
        return Energy(
            power=power,
            pue=pue,
            gpu_kwh=formulas.energy_kwh(watts=power.watts, hours=hours),
            facility_kwh=facility,
            co2e_kg=None if grid is None else formulas.co2e_kg(kwh=facility, gram_per_kwh=grid),
        )

    def notes(self) -> Iterator[str]:
        """What must be said about the price and the hours."""
        question = self.question
        ambiguous = {catalog.normalised(name): text for name, text in self.gpu.ambiguous_aliases.items()}
        taken = ambiguous.get(catalog.normalised(question.gpu))
        if taken is not None:
            yield f"{question.gpu}: {taken}"
        if self.quote is not None:
            yield from self.quote.warnings
            if self.quote.row is not None and self.quote.row.notes:
                yield f"of this price: {self.quote.row.notes}"
        if question.term in ("1yr", "3yr", "owned") and self.hours * self.running < MONTH_HOURS:
            yield f"{question.term} GPUs are paid for all {MONTH_HOURS} h, used or not"
        if question.term == "spot" and question.spot_reserve:
            yield "the reserve against interruptions is an assumption: --spot-reserve"
        if question.term == "owned" and self.owned is not None:
            yield from self.owned.notes
        if self.energy() is None:
            yield f"no power of {self.gpu.name} is known: no energy; --watts sets it"
        if self.speed is not None:
            yield from self.speed.notes


__all__ = ["CostEstimate", "answer", "cost"]
