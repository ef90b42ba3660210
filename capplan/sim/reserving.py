"""A replica for schedulers that let a request in only with room for all that it may become."""

from capplan.sim.replica import KvMemory, Limits, Replica, Step
from capplan.sim.request import Request


class ReservingReplica(Replica):
    """Keeps count of `promised_blocks`: what all running requests may hold in the end, by what they ask.

    Blocks that several requests share are counted for each of them.
    """

    def __init__(self, limits: Limits, blocks: KvMemory | None = None) -> None:
        super().__init__(limits, blocks)
        self.promised_blocks = 0

    def has_room(self, request: Request) -> bool:
        """Whether a waiting request fits beside those running even if all make all they may."""
        return self.promised_blocks + self.blocks_to_end(request) <= self.limits.kv_blocks

    def admit(self, step: Step, request: Request, most: int) -> int:
        """Let the request in with a chunk of `most` tokens at most; the chunk's tokens, 0: no room."""
        taken = super().admit(step, request, most)
        if taken:
            self.promised_blocks += self.blocks_to_end(request)
        return taken

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        self.promised_blocks -= self.blocks_to_end(request)
