"""What one GPU must hold, and what a memory can hold: need, verdict, users, context, waste.

Arithmetic over the model's caches (kv.py) with formulas/memory; no names, no files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capplan.formulas import memory
from capplan.kv import KvLayout

MAX_USERS: Final = 10**9
MAX_CONTEXT: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overhead:
    """Memory beside weights and KV cache. `high_bytes` is what verdicts use; a given size has no band."""

    low_bytes: int
    high_bytes: int
    rule: str
    named: Mapping[str, int] | None = None

    def parts(self) -> list[dict[str, Any]]:
        """Named parts that sum to `high_bytes`."""
        if self.named is not None:
            return [{"name": name, "bytes": size} for name, size in self.named.items()]
        if self.low_bytes == self.high_bytes:
            return [{"name": "given", "bytes": self.high_bytes}]
        return [
            {"name": "rule of thumb, lower end (15 % of weights)", "bytes": self.low_bytes},
            {
                "name": "up to the upper end (20 % of weights)",
                "bytes": self.high_bytes - self.low_bytes,
            },
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Need:
    """What one GPU, the fullest rank, must hold in bytes; `kv_bytes` is None without an architecture."""

    weights_bytes: int
    extra_bytes: int
    kv_bytes: int | None
    tail_bytes: int
    overhead: Overhead

    @property
    def total_bytes(self) -> int:
        """Weights, parts beside the decoder, KV cache with block tails, overhead at its upper end."""
        kv = (self.kv_bytes or 0) + self.tail_bytes
        return round(
            memory.total_bytes(
                weights=self.weights_bytes + self.extra_bytes,
                kv_cache=kv,
                overhead=self.overhead.high_bytes,
            )
        )

    @property
    def low_bytes(self) -> int:
        """The same with the overhead at its lower end."""
        return self.total_bytes - self.overhead.high_bytes + self.overhead.low_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """One GPU (or memory size) against the need.

    `fits` True or False where the whole overhead band agrees, None where the band straddles the memory or
    the KV cache is unknown. Capacities are counted at the upper end of the overhead.
    """

    name: str
    gpu_id: str | None
    usable_bytes: int
    reading: str
    fits: bool | None
    headroom_bytes: int
    max_users: int | None
    max_context: int | None
    pool_bytes: int | None
    pool_tokens: int | None
    max_concurrency: float | None
    note: str = ""
    device: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON of one verdict."""
        return {
            "name": self.name,
            "id": self.gpu_id,
            "usable_bytes": self.usable_bytes,
            "usable_reading": self.reading,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "max_users": self.max_users,
            "max_context": self.max_context,
            "kv_pool": {"bytes": self.pool_bytes, "tokens": self.pool_tokens},
            "max_concurrency": self.max_concurrency,
            "note": self.note,
            **({} if self.device is None else {"device": dict(self.device)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paging:
    """KV memory that holds nothing: paged tail blocks beside contiguous pre-allocation.

    Contiguous allocation reserves `reserved_tokens` a sequence; `external_bytes` is what no further
    reservation fits into (known only with a GPU).
    """

    block_size: int
    tail_bytes: int
    tail_fraction: float
    reserved_tokens: int
    reserved_unused_bytes: int
    reserved_unused_fraction: float
    external_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON of the comparison."""
        return {
            "block_size": self.block_size,
            "paged": {"tail_bytes": self.tail_bytes, "tail_fraction": self.tail_fraction},
            "contiguous": {
                "reserved_tokens_per_sequence": self.reserved_tokens,
                "reserved_unused_bytes": self.reserved_unused_bytes,
                "reserved_unused_fraction": self.reserved_unused_fraction,
                "external_fragmentation_bytes": self.external_bytes,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A memory to fit into.

    Of a local GPU also the whole as the driver has it, what is free now, and what is known of the device.
    """

    name: str
    gpu_id: str | None
    usable_bytes: int
    reading: str
    note: str = ""
    whole_bytes: int | None = None
    free_bytes: int | None = None
    device: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """What the users of one of `replicas` ask of the KV cache, and the arithmetic over it.

    Each user has `samples` sequences that share the full blocks of a prompt of `prompt` tokens.
    """

    layout: KvLayout | None
    users: int
    context: int
    block_size: int
    prefix_shared: int
    max_context: int | None
    samples: int = 1
    prompt: int = 0
    replicas: int = 1

    def kv_bytes(self, users: int, context: int) -> tuple[int, int]:
        """KV cache of `users` full contexts with what they share once, and its block tails.

            users · samples · sequence − (users − 1) · prefix − users · (samples − 1) · prompt's full blocks

        A prompt's last block that is not full is copied for each sample when it writes its first token.
        """
        layout = self.layout
        if layout is None:
            return 0, 0
        sequences = users * self.samples
        exact = layout.sequence_bytes(context) * sequences
        paged = layout.paged_bytes(context, self.block_size) * sequences
        saved = self._shared_bytes(layout, users, min(self.prefix_shared, context))
        saved += users * self._shared_bytes(layout, self.samples, min(self.prompt, context))
        exact, paged = exact - saved, paged - saved
        return round(exact), max(0, round(paged) - round(exact))

    def _shared_bytes(self, layout: KvLayout, sequences: int, tokens: int) -> float:
        """What is not kept again where `sequences` share their first `tokens` tokens."""
        shared = tokens // self.block_size * self.block_size
        if not shared or sequences < 2:
            return 0
        # Layers that keep a window, and states, have nothing of a prefix to share in general.
        return sum(
            group.entry_bytes
            * memory.shared_prefix_saved_tokens(
                users=sequences, prefix_tokens=shared // group.stride, block_size=self.block_size
            )
            for group in layout.groups
            if group.window is None
        )

    def need(self, *, weights: int, extra: int, overhead: Overhead) -> Need:
        """What one GPU must hold."""
        kv, tail = self.kv_bytes(self.users, self.context)
        return Need(
            weights_bytes=weights,
            extra_bytes=extra,
            kv_bytes=None if self.layout is None else kv,
            tail_bytes=tail,
            overhead=overhead,
        )

    def verdict(self, target: Target, need: Need) -> Verdict:
        """The need against one memory."""
        usable = target.usable_bytes
        headroom = round(memory.headroom_bytes(usable=usable, total=need.total_bytes))
        best = usable - need.low_bytes
        fits: bool | None = True if headroom >= 0 else False if best < 0 else None
        if self.layout is None and fits:
            fits = None
        fixed = need.weights_bytes + need.extra_bytes + need.overhead.high_bytes
        pool = max(0, usable - fixed)
        if self.layout is None:
            capacity: tuple[int | None, ...] = (None, None, None)
            concurrency = None
        else:
            concurrency = self.concurrency(pool)
            tokens = None if concurrency is None else int(concurrency * self.context)
            capacity = (self.most_users(pool) * self.replicas, self.longest_context(pool), tokens)
        return Verdict(
            name=target.name,
            gpu_id=target.gpu_id,
            usable_bytes=usable,
            reading=target.reading,
            fits=fits,
            headroom_bytes=headroom,
            max_users=capacity[0],
            max_context=capacity[1],
            pool_bytes=pool,
            pool_tokens=capacity[2],
            max_concurrency=concurrency,
            note=target.note,
            device=target.device,
        )

    def concurrency(self, pool: int) -> float | None:
        """Full contexts a pool holds, with a fraction, as engines log it.

        With one kind of cache the pool is cut into whole blocks first; hybrids are counted by bytes.
        """
        layout = self.layout
        if layout is None:
            return None
        only = layout.groups[0] if len(layout.groups) == 1 else None
        if only is not None and only.kind in ("full", "mla") and only.entry_bytes:
            blocks = memory.pool_blocks(
                pool_bytes=pool, block_size=self.block_size, kv_bytes_per_token=only.entry_bytes
            )
            return blocks / memory.kv_blocks(tokens=self.context, block_size=self.block_size)
        one = layout.paged_bytes(self.context, self.block_size)
        return pool / one if one else None

    def _fits_in(self, pool: int, users: int, context: int) -> bool:
        kv, tail = self.kv_bytes(users, context)
        return kv + tail <= pool

    def most_users(self, pool: int) -> int:
        """Most users at this context."""
        first, second = (sum(self.kv_bytes(users, self.context)) for users in (1, 2))
        # Every further user adds the same, so the first guess is right but for rounding.
        guess = 1 + (pool - first) // (second - first) if second > first else MAX_USERS
        return _largest(lambda users: self._fits_in(pool, users, self.context), MAX_USERS, guess)

    def longest_context(self, pool: int) -> int | None:
        """Longest context at these users, at most the model's own limit; None where nothing bounds it."""
        limit = self.max_context or MAX_CONTEXT
        if self._fits_in(pool, self.users, limit):
            # Nothing bounds it but the model's own limit; a model without one has no longest context.
            return self.max_context
        here = sum(self.kv_bytes(self.users, self.context))
        # Exact where every layer keeps every token; a start for the search where windows bend the line.
        block = self.block_size
        guess = int(pool / here * self.context) // block * block if here else limit
        return _largest(lambda context: self._fits_in(pool, self.users, context), limit, guess)

    def paging(self, pool_bytes: int | None) -> Paging | None:
        """Waste of paging beside that of contiguous pre-allocation of the model's longest context.

        `pool_bytes` is the memory left for KV where one GPU is named.
        """
        layout = self.layout
        if layout is None or not layout.pages:
            return None
        reserved = max(self.max_context or self.context, self.context)
        used_bytes = layout.sequence_bytes(self.context)
        reserved_bytes = layout.sequence_bytes(reserved)
        paged_bytes = layout.paged_bytes(self.context, self.block_size)
        external = None
        sequences = self.users * self.samples * self.replicas
        if pool_bytes is not None:
            external = round(
                memory.external_fragmentation_bytes(pool_bytes=pool_bytes, reservation_bytes=reserved_bytes)
            )
        return Paging(
            block_size=self.block_size,
            tail_bytes=round(paged_bytes - used_bytes) * sequences,
            tail_fraction=(paged_bytes - used_bytes) / paged_bytes if paged_bytes else 0.0,
            reserved_tokens=reserved,
            reserved_unused_bytes=round(reserved_bytes - used_bytes) * sequences,
            reserved_unused_fraction=1 - used_bytes / reserved_bytes if reserved_bytes else 0.0,
            external_bytes=external,
        )


def all_hold(answers: Sequence[bool | None]) -> bool | None:
    """Whether all of several hold: False where one does not, None where one is open."""
    return False if False in answers else None if None in answers else True


def _largest(holds: Callable[[int], bool], limit: int, guess: int) -> int:
    """The largest n in [0, limit] for which a condition that only turns false once holds.

    The search gallops away from `guess` in steps that double, then halves the bracket: a good guess needs
    two trials, a bad one twice its logarithm.
    """
    guess = min(max(guess, 1), limit)
    step = 1
    if holds(guess):
        low, high = guess, limit + 1
        while low + step < high:
            if not holds(low + step):
                high = low + step
                break
            low, step = low + step, step * 2
    else:
        low, high = 0, guess
        while high - step > 0:
            if holds(high - step):
                low = high - step
                break
            high, step = high - step, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
