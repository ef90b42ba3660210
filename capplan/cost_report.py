"""The answer of `capplan cost` as text: terminal view, Markdown, CSV rows, the lines of --explain."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from capplan.report import grid, to_markdown
from capplan.units import HOUR_S, format_unit_price, format_usd

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from capplan.cost_answer import CostEstimate

WORDS: Final = {"on-demand": "on demand", "spot": "spot", "1yr": "1 year", "3yr": "3 years", "owned": "owned"}


def title(made: "CostEstimate") -> str:
    """GPUs, the way to pay, the month."""
    count = made.question.fleet_gpus
    gpus = f"{count:,} × {made.gpu.name}" if count > 1 else made.gpu.name
    model = f"{made.speed.model} on " if made.speed is not None and made.speed.model else ""
    return f"{model}{gpus}, {WORDS[made.question.term]}: {format_usd(made.usd_per_month)} USD a month"


def price_lines(made: "CostEstimate") -> Iterator[str]:
    """The price with its day and source, and how far others lie."""
    quote = made.price
    if quote is None:
        owned = made.ownership
        if owned is not None:
            yield (
                f"typical figures of ownership; with all low or all high: "
                f"{format_usd(owned.low_usd)} to {format_usd(owned.high_usd)} USD a month"
            )
        return
    rate = f"price: {format_unit_price(quote.usd_per_gpu_hour)} USD per GPU-hour"
    if quote.row is None:
        yield f"{rate}, {quote.source}"
        return
    row = quote.row
    whole = f", {row.gpu_count} GPUs for {format_usd(row.usd_per_hour)}" if row.gpu_count > 1 else ""
    when = f"read {row.read_on}" if row.dated == "exact" else f"of about {row.read_on}"
    yield f"{rate}, {row.cloud} ({row.instance}, {row.region}{whole}), {when}, {quote.age_days} days ago"
    yield f"source: {quote.source}"
    if quote.spread is not None:
        spread = quote.spread
        yield (
            f"all known, {WORDS[quote.term]}: {format_usd(spread.low)} to {format_usd(spread.high)}, median "
            f"{format_usd(spread.median)} ({spread.rows} prices of {spread.clouds} providers)"
        )


def item_cells(made: "CostEstimate") -> list[tuple[str, str, str, str, str]]:
    """Line items: name, quantity, unit price, USD, note; then the sum and what of it is idle."""
    found = [
        (
            item.name,
            f"{_quantity(item.quantity)} {item.unit}",
            f"× {format_unit_price(item.usd_per_unit)}",
            format_usd(item.usd),
            item.note,
        )
        for item in made.line_items
    ]
    found.append(("a month", "", "", format_usd(made.usd_per_month), "USD"))
    idle = f"{1 - made.busy:.0%}, inside the bill" if made.busy < 1 else "every hour counts as busy"
    found.append(("of which idle", "", "", format_usd(made.idle_usd), idle))
    return found


def _quantity(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def token_rows(made: "CostEstimate") -> list[tuple[str, str, str]]:
    """What tokens, requests and users cost: name, USD, what it counts."""
    tokens = made.tokens
    found: list[tuple[str, str, str]] = []
    if tokens is not None:
        share = tokens.prefill_share
        split = (
            "the speed given says nothing of prompts: all cost is on output tokens"
            if share is None
            else f"by time: prefill {share:.0%}, decode {1 - share:.0%}"
        )
        found.append(("1M output tokens", format_usd(tokens.usd_per_million_output), split))
        if tokens.usd_per_million_input is not None:
            found.append(("1M input tokens", format_usd(tokens.usd_per_million_input), ""))
        if tokens.usd_per_million_blended is not None and made.question.lengths is not None:
            isl, osl = made.question.lengths
            mix = f"{isl:,} in + {osl:,} out"
            found.append(("1M tokens, blended", format_usd(tokens.usd_per_million_blended), mix))
        if share is not None:
            alone = format_usd(tokens.usd_per_million_output_alone)
            found.append(("1M output tokens, all in", alone, "the whole bill on output tokens"))
        if tokens.usd_per_request is not None:
            found.append(("a request", format_usd(tokens.usd_per_request), ""))
    if made.usd_per_user_month is not None:
        found.append(("a user and month", format_usd(made.usd_per_user_month), _users(made)))
    return found


def _users(made: "CostEstimate") -> str:
    question = made.question
    if question.users is not None:
        return f"of {question.users:,} users"
    if question.requests_per_user_day is not None:
        return f"at {question.requests_per_user_day:g} requests a day"
    return f"of the {made.speed.users if made.speed else 0:,} at work at once"


def speed_line(made: "CostEstimate") -> str | None:
    """Tokens per second and what they are from."""
    speed = made.speed
    if speed is None:
        return None
    band = f" (P10–P90 {speed.low:,.0f} to {speed.high:,.0f})" if speed.low and speed.high else ""
    busy = f"{made.question.utilization:.0%} of the time"
    if made.question.request_per_s is not None:
        busy = f"{speed.busy:.0%} of what the fleet can serve"
    digits = 0 if speed.output_token_per_s >= 100 else 2
    rate = f"{speed.output_token_per_s:,.{digits}f} output tokens/s{band}, {speed.provenance}"
    return f"speed: {rate}; {speed.load}; {busy}"


def option_cells(made: "CostEstimate") -> list[tuple[str, str, str, str, str]]:
    """Ways to pay: name, USD per GPU-hour, a month, a million output tokens, where and when."""
    found = []
    for option in made.options:
        name = WORDS[option.way] + (" *" if option.way == made.question.term else "")
        if option.usd_per_month is None or option.usd_per_gpu_hour is None:
            found.append((name, "no price", "–", "–", "unpriced, not free"))
            continue
        million = option.usd_per_million_output_token
        row = option.price.row if option.price is not None else None
        where = f"{row.cloud}, {option.price.age_days} days old" if option.price and row else ""
        if option.way == "owned":
            where = "typical figures"
        elif row is None:
            where = "given"
        if option.way == "spot" and made.question.spot_reserve:
            where += f", {made.question.spot_reserve:.0%} reserve"
        found.append(
            (
                name,
                format_usd(option.usd_per_gpu_hour),
                format_usd(option.usd_per_month),
                "–" if million is None else format_usd(million),
                where,
            )
        )
    return found


def break_even_lines(made: "CostEstimate") -> Iterator[str]:
    """Renting, owning, and an API."""
    even, owned = made.break_even, made.ownership
    if owned is not None and even.rent_hours_per_month is not None:
        months = even.own_months
        when = "never" if months is None else f"after {months:,.0f} months"
        life = owned.assumptions["depreciation_years"].typical
        if months is not None and months > 12 * life:
            when += f", past its {life:g} years"
        yield (
            f"owning ({format_usd(owned.purchase_usd)} USD at once, {format_usd(owned.running_usd)} a month) "
            f"has cost less than renting {when}"
        )
        hours = even.rent_hours_per_month
        yield (
            f"renting by the hour is cheaper below {hours:,.0f} h a month"
            if hours <= 730
            else "renting costs less than owning even for all 730 h a month"
        )
    if even.api_usd_per_month is not None and even.api_tokens_per_month is not None:
        needed, share = even.api_tokens_per_month, even.api_utilization or 0.0
        yield (
            f"the API at {format_usd(even.api_usd_per_million or 0)} USD per 1M: "
            f"{format_usd(even.api_usd_per_month)} USD a month for the same tokens"
        )
        reach = f"{share:.0%} utilisation" if share <= 1 else "more than this fleet can serve"
        yield f"this fleet is cheaper from {needed / 1e6:,.0f}M tokens a month on: {reach}"


def energy_line(made: "CostEstimate") -> str | None:
    """Energy and emissions."""
    energy = made.energy
    if energy is None:
        return None
    text = (
        f"energy: {energy.gpu_kwh:,.0f} kWh a month, {energy.facility_kwh:,.0f} kWh with PUE {energy.pue:g} "
        f"({energy.power.watts:,.0f} W a GPU, {energy.power.provenance})"
    )
    return text if energy.co2e_kg is None else f"{text}; {energy.co2e_kg:,.0f} kg CO2e"


def lines(made: "CostEstimate") -> list[str]:
    """Everything after the tables."""
    found = []
    if made.by_utilization:
        parts = ", ".join(f"{format_usd(usd)} at {part:.0%}" for part, usd in made.by_utilization.items())
        found.append(f"1M output tokens by utilisation, same bill: {parts}")
    found += list(break_even_lines(made))
    energy = energy_line(made)
    if energy is not None:
        found.append(energy)
    return found + [f"note: {note}" for note in made.notes]


def view(made: "CostEstimate") -> list["RenderableType"]:
    """The terminal's answer."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(title(made), style="bold")]
    parts += [Text(line) for line in price_lines(made)]
    parts += [Text(""), _table(item_cells(made), right=(1, 2, 3))]
    speed, tokens = speed_line(made), token_rows(made)
    if speed is not None or tokens:
        parts += [Text("")] + ([Text(speed)] if speed is not None else [])
        parts.append(_table(tokens, right=(1,), head=("USD for", "", "")))
    parts += [Text("")]
    head = ("way to pay", "GPU-hour", "a month", "1M output", "")
    parts.append(_table(option_cells(made), right=(1, 2, 3), head=head))
    parts += [Text("")] + [Text(line) for line in lines(made)]
    return parts


def _table(
    cells: "list[tuple[str, ...]] | list[Any]", *, right: tuple[int, ...], head: tuple[str, ...] = ()
) -> "Table":
    """Cells in columns; the last column folds."""
    table = grid()
    width = len(cells[0]) if cells else 1
    for number in range(width):
        last = number == width - 1
        table.add_column(justify="right" if number in right else "left", no_wrap=not last, overflow="fold")
    if head:
        table.add_row(*head, style="bold")
    for row in cells:
        table.add_row(f"  {row[0]}", *row[1:])
    return table


def rows(made: "CostEstimate") -> list[dict[str, Any]]:
    """CSV: the line items of the bill."""
    base = {"gpu": made.gpu.id, "gpus": made.question.fleet_gpus, "term": made.question.term}
    return [{**base, **item.to_dict()} for item in made.line_items]


def markdown(made: "CostEstimate") -> str:
    """Line items and ways to pay as Markdown tables, then the lines."""
    items = to_markdown(
        [
            {"item": name, "quantity": quantity, "unit price": each, "USD": usd, "": note}
            for name, quantity, each, usd, note in item_cells(made)
        ]
    )
    tokens = to_markdown([{"USD for": name, "USD": usd, "": note} for name, usd, note in token_rows(made)])
    ways = to_markdown(
        [
            {"way to pay": name, "GPU-hour": rate, "a month": usd, "1M output": million, "": note}
            for name, rate, usd, million, note in option_cells(made)
        ]
    )
    speed = speed_line(made)
    head = "".join(f"{line}\n\n" for line in (*price_lines(made), *([speed] if speed else [])))
    tables = "\n".join(part for part in (items, tokens, ways) if part)
    return f"**{title(made)}**\n\n{head}{tables}\n" + "".join(f"- {line}\n" for line in lines(made))


def explain(made: "CostEstimate") -> tuple[str, ...]:
    """The formulas with this answer's numbers in them."""
    found = [
        f"{item.name}: {_quantity(item.quantity)} {item.unit} × {item.usd_per_unit:,.6g} USD = "
        f"{item.usd:,.2f} USD ({item.note})"
        for item in made.line_items
    ]
    found.append(f"month: sum of the items = {made.usd_per_month:,.2f} USD")
    found.append(
        f"idle, inside the bill: {made.usd_per_month:,.2f} · (1 − {made.busy:.4g}) = {made.idle_usd:,.2f} USD"
    )
    tokens, speed = made.tokens, made.speed
    if tokens is not None and speed is not None:
        part = tokens.output / (speed.output_token_per_s * HOUR_S * made.hours)
        found.append(
            f"output tokens: {speed.output_token_per_s:,.6g}/s · 3600 · {made.hours:,.6g} h · {part:.4g} of "
            f"the time = {tokens.output:,.0f}"
        )
        share = 1 - (tokens.prefill_share or 0)
        found.append(
            f"1M output tokens: 10⁶ · {made.usd_per_month:,.2f} · {share:.4g} / {tokens.output:,.0f} = "
            f"{tokens.usd_per_million_output:,.6g} USD"
        )
        if tokens.input is not None and tokens.usd_per_million_input is not None:
            found.append(
                f"1M input tokens: 10⁶ · {made.usd_per_month:,.2f} · {tokens.prefill_share:.4g} / "
                f"{tokens.input:,.0f} = {tokens.usd_per_million_input:,.6g} USD"
            )
    energy = made.energy
    if energy is not None:
        found.append(
            f"energy: {energy.power.watts:,.0f} W · GPU-hours / 1000 · PUE {energy.pue:g} = "
            f"{energy.facility_kwh:,.1f} kWh"
        )
    return tuple(found)
