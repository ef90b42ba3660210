"""Why this number: the topics of `capplan explain`, and the lines of `--explain`.

A topic's text is its formula's docstring and its numbers are computed; the lines of `--explain` put the
numbers of one answer into the formulas that made them.
"""

from collections.abc import Iterator
from typing import Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.estimate import VramEstimate
from capplan.formulas import memory
from capplan.kv import KvLayout
from capplan.overhead import OVERHEAD_HIGH, OVERHEAD_LOW
from capplan.specs import Cache, Model
from capplan.topics import TOPICS, Line, Topic
from capplan.units import format_bytes

__all__ = ["Line", "Topic", "explain_vram", "find", "topics"]

_ALIKE: Final = str.maketrans("", "", "-_ ")


def topics() -> tuple[Topic, ...]:
    """All topics, by subject."""
    return TOPICS


def find(name: str) -> Topic:
    """The topic with this id or alias, case and - _ space alike; InputError where there is none."""
    wanted = _folded(name)
    for topic in TOPICS:
        if wanted in map(_folded, (topic.id, *topic.aliases)):
            return topic
    known = [known for topic in TOPICS for known in (topic.id, *topic.aliases)]
    raise InputError(
        f"unknown topic {shown(name)}",
        where="explain",
        hint=did_you_mean(name, known, "`capplan explain --list` shows all topics"),
    )


def _folded(name: str) -> str:
    return name.lower().translate(_ALIKE)


def explain_vram(estimate: VramEstimate) -> tuple[str, ...]:
    """How the figures of a memory estimate come about, one step a line.

    Every figure is the one in `estimate.to_dict()`.
    """
    return (
        *_weights(estimate),
        *_kv_cache(estimate),
        *_overhead(estimate),
        *_total(estimate),
        *_verdicts(estimate),
    )


def _size(size: float) -> str:
    """Bytes to the last one, and readable."""
    exact = f"{size:,.0f} B" if float(size).is_integer() else f"{size:,.3f} B"
    return exact if abs(size) < 1 << 20 else f"{exact} ({format_bytes(size)})"


def _weights(estimate: VramEstimate) -> Iterator[str]:
    bits = estimate.nominal_bits
    headline = round(memory.weight_bytes(parameters=estimate.parameters, bits=bits))
    yield (
        f"weights, headline at {bits:g} bits: P · B / 8 ="
        f" {estimate.parameters:,} · {bits:g} / 8 = {_size(headline)}"
    )
    budget = estimate.weights
    if budget is not None:
        stored = estimate.precision
        if stored is not None and stored.scale_bits and stored.group_shape == "input":
            each = memory.effective_bits(
                element_bits=stored.element_bits,
                group=stored.group,
                scale_bits=stored.scale_bits,
                zero_bits=stored.zero_bits,
            )
            yield (
                f"  {stored.id}: {stored.element_bits:g} + ({stored.scale_bits:g} + {stored.zero_bits:g})"
                f" / {stored.group} = {each:g} bits a weight with scales and zero points"
            )
        for part in budget.roles:
            each = part.bytes * 8 / part.parameters
            yield f"  {part.role}: {part.parameters:,} at {each:.4g} bits each = {_size(part.bytes)}"
        yield f"weights, as stored: sum of the roles = {_size(estimate.weights_bytes)}"
    if estimate.gpus > 1:
        yield f"weights of {_which(estimate)} = {_size(estimate.need.weights_bytes)}"


def _kv_cache(estimate: VramEstimate) -> Iterator[str]:
    layout, model, whole = estimate.layout, estimate.kv_model, estimate.whole_layout
    question = estimate.question
    if layout is None or model is None or whole is None:
        yield "KV cache: not counted, a parameter count has no layers"
        return
    yield from _entries(estimate, model, whole)
    for group in layout.groups:
        users = question.users_per_replica * question.n
        if group.kind == "state":
            states = group.state_bytes * users
            yield f"state: {group.state_bytes:,} B · {users:,} {_sequences(estimate)} = {_size(states)}"
            continue
        kept = memory.kept_tokens(context=question.context, window=group.window, stride=group.stride)
        total = group.entry_bytes * kept * users
        yield (
            f"KV cache, {_name(group.kind, group.window, group.stride)}: {_plain(group.entry_bytes)} B"
            f" · {kept:,} entries · {users:,} {_sequences(estimate)} = {_size(total)}"
        )
    if question.prefix_shared or question.n > 1:
        before = round(layout.sequence_bytes(question.context) * question.users_per_replica * question.n)
        saved = before - (estimate.need.kv_bytes or 0)
        if question.n > 1:
            each = f"a prompt of {question.isl:,} for its {question.n} samples"
            each += " and the shared prefix" if question.prefix_shared else ""
            yield f"KV cache kept once, not for every sequence: full blocks of {each}: −{_size(saved)}"
        else:
            times = f"{question.users_per_replica:,}"
            yield f"KV cache kept once, not {times} times, for the shared prefix: −{_size(saved)}"
    yield f"KV cache{_each(estimate)} = {_size(estimate.need.kv_bytes or 0)}"
    yield (f"tails of the last blocks of {question.block_size} tokens = {_size(estimate.need.tail_bytes)}")


def _entries(estimate: VramEstimate, model: Model, whole: KvLayout) -> Iterator[str]:
    """KV cache per token of the whole model, one line for each shape of cache."""
    for cache, layers in _caches(model).items():
        if cache.kind == "state":
            continue
        bits = cache.element_bits or estimate.kv_bits
        each = memory.kv_entry_bytes(
            heads=cache.heads,
            k_width=cache.k_width,
            v_width=cache.v_width,
            element_bits=bits,
            extra_bytes=cache.entry_extra_bytes,
        )
        extra = f" + {cache.entry_extra_bytes}" if cache.entry_extra_bytes else ""
        heads = f"{cache.heads} head{'s' if cache.heads > 1 else ''}"
        widths = f"{layers} layers · ({heads} · ({cache.k_width} + {cache.v_width})"
        yield (
            f"KV per entry, {_name(cache.kind, cache.window, cache.stride)}:"
            f" {widths} · {bits:g} bits / 8{extra}) = {_plain(layers * each)} B"
        )
    if whole.state_bytes:
        yield f"state of a sequence, whatever its length = {_size(whole.state_bytes)}"
    yield f"KV per token, {estimate.kv_format.id} = {_plain(whole.bytes_per_token)} B"


def _caches(model: Model) -> dict[Cache, int]:
    """Each shape of cache and how many layers have it."""
    made: dict[Cache, int] = {}
    for group in model.groups:
        for cache in group.layer.caches():
            made[cache] = made.get(cache, 0) + len(group.indices)
    return made


def _name(kind: str, window: int | None, stride: int) -> str:
    parts = [kind]
    if window is not None:
        parts.append(f"window {window:,}")
    if stride > 1:
        parts.append(f"every {stride} tokens")
    return " ".join(parts)


def _overhead(estimate: VramEstimate) -> Iterator[str]:
    overhead = estimate.need.overhead
    if overhead.low_bytes == overhead.high_bytes:
        yield f"overhead, {overhead.rule} = {_size(overhead.high_bytes)}"
        return
    weights = estimate.need.weights_bytes
    for fraction, size in (
        (OVERHEAD_LOW, overhead.low_bytes),
        (OVERHEAD_HIGH, overhead.high_bytes),
    ):
        yield f"overhead, rule of thumb: {weights:,} · {fraction:.2f} = {_size(size)}"


def _total(estimate: VramEstimate) -> Iterator[str]:
    need = estimate.need
    for name, size in estimate.extra.items():
        yield f"beside the decoder, {name} = {_size(size)}"
    parts = [need.weights_bytes, *estimate.extra.values(), need.kv_bytes or 0, need.tail_bytes]
    parts.append(need.overhead.high_bytes)
    yield f"total{_each(estimate)}: {' + '.join(f'{part:,}' for part in parts)} = {_size(need.total_bytes)}"
    if need.low_bytes != need.total_bytes:
        yield f"total with the overhead at its lower end = {_size(need.low_bytes)}"


def _verdicts(estimate: VramEstimate) -> Iterator[str]:
    if not estimate.named:
        yield "no GPU named: no headroom, see the fit table"
        return
    need, question = estimate.need, estimate.question
    fixed = need.total_bytes - (need.kv_bytes or 0) - need.tail_bytes
    # Of several engines or GPUs side by side the figures are those of the one told.
    told = (estimate.told,) if estimate.rows else estimate.verdicts
    for verdict in filter(None, told):
        yield (
            f"{verdict.name}: headroom = {verdict.usable_bytes:,} − {need.total_bytes:,}"
            f" = {_size(verdict.headroom_bytes)}"
        )
        if estimate.layout is None or verdict.max_users is None:
            continue
        sequence = estimate.layout.paged_bytes(question.context, question.block_size)
        one = round(sequence * question.n)
        yield (
            f"  left for KV: max(0, {verdict.usable_bytes:,} − {fixed:,}) = {_size(verdict.pool_bytes or 0)}"
        )
        shared = ", the prefix once" if question.prefix_shared else ""
        shared += ", prompts once" if question.n > 1 else ""
        yield (
            f"  most users at {question.context:,} tokens of {one:,} B in blocks{shared}:"
            f" {verdict.max_users:,}"
        )
        limit = estimate.kv_model.max_context if estimate.kv_model else None
        bound = f" (the model's limit is {limit:,})" if limit else ""
        longest = "not bounded" if verdict.max_context is None else f"{verdict.max_context:,} tokens{bound}"
        yield f"  longest context of {question.users:,} users: {longest}"


def _sequences(estimate: VramEstimate) -> str:
    return "users" if estimate.question.n == 1 else f"samples ({estimate.question.n} a user)"


def _which(estimate: VramEstimate) -> str:
    """The GPU whose figures these are."""
    text = f"one of {estimate.gpus} GPUs"
    stage = next((rank.stage for rank in estimate.ranks if rank.need is estimate.need), None)
    if stage is not None:
        layers = stage.layers
        text += f", the fullest stage's (layers {layers.start} to {layers.stop - 1})"
    return text


def _each(estimate: VramEstimate) -> str:
    return "" if estimate.gpus == 1 else f" on each of {estimate.gpus} GPUs"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
