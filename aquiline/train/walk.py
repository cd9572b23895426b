"""The walk: the accepted length of chain decoding, simulated over stored greedy replies.

Decoding restarts behind each accepted run, so accuracies averaged over all rows say something else and overstate. The
walk starts at the row before the first drafted token, emits one token more than the leading rights, and jumps there:

    reply     y0   y1   y2   y3   y4        y0 comes from prefill
    row of y0: right right wrong            emits y1 y2 and the target's own y3
    row of y3: right                        emits y4, the reply is over

On float32 greedy replies that end by a stop it equals real chain decoding, cycle by cycle. (At a length limit a decoder
with room for one token does not draft for it.)
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Walk:
    """Counts over replies. `tried[n]`: drafted tokens at depth n+1 whose n predecessors were accepted."""

    emitted: int = 0
    cycles: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens emitted by each cycle, in order

    @property
    def tau(self) -> float | None:
        """Tokens emitted per cycle; None without a cycle."""
        return self.emitted / self.cycles if self.cycles else None

    @property
    def n_alpha(self) -> list[float | None]:
        """Share accepted at depth n+1 given that the n before were; None where none was tried."""
        return [a / t if t else None for a, t in zip(self.accepted, self.tried, strict=True)]

    def add(self, right_KT: Tensor, counted_KT: Tensor, first: int, end: int) -> None:
        """Walk one reply whose tokens stand at `first..end-1`.

        `right_KT[k, t]`: the draft's token for x_{t+2+k} is the stored one; `counted_KT`: the stored one is the
        target's own arg-max. Where it is not, the chain ends uncounted: that token is the target's own.
        """
        steps = len(right_KT)
        self.tried += [0] * (steps - len(self.tried))
        self.accepted += [0] * (steps - len(self.accepted))
        right, counted = right_KT[:, first - 1 : end].tolist(), counted_KT[:, first - 1 : end].tolist()
        at, left = 0, end - first - 1  # row of the last known token, tokens still to come
        while left > 0:
            run = 0
            while run < min(steps, left) and counted[run][at]:
                self.tried[run] += 1
                if not right[run][at]:
                    break
                self.accepted[run] += 1
                run += 1
            emit = min(run + 1, left)
            self.lengths.append(emit)
            self.emitted += emit
            self.cycles += 1
            at, left = at + emit, left - emit
