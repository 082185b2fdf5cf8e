"""Which rank writes which sample."""

from bisect import bisect_left

from tasks.prefixes import NAME_BYTES


class Deal:
    """Deals samples over the ranks that write them.

    What a sample begins with like the last one of a rank, that rank has written already and links to; another would
    have to write it once more. So a sample goes where the least of it is new, among the ranks that are not too far
    ahead of the others, and of equal ones to that which has been given the least.
    """

    def __init__(self, writers: int, *, block: int, lead: int) -> None:
        """Begin.

        Args:
            writers: how many ranks write.
            block: tokens from one name of a prefix to the next.
            lead: tokens of new rows that one rank may have been given more than another.
        """
        self._block, self._lead = block, lead
        self.given = [0] * writers
        """Tokens of new rows, by rank."""
        self._prefixes = [b""] * writers

    def writer(self, num_tokens: int, prefix: bytes = b"") -> int:
        """Rank for the next sample.

        Args:
            num_tokens: T
            prefix: names of its first blocks, one behind the other (see :func:`tasks.prefixes.prefix_names`).
        """
        new = [num_tokens - self._block * _alike(prefix, last) for last in self._prefixes]
        limit = min(self.given) + self._lead
        ranks = [rank for rank, given in enumerate(self.given) if given <= limit]
        writer = min(ranks, key=lambda rank: (new[rank], self.given[rank]))
        self.given[writer] += new[writer]
        self._prefixes[writer] = prefix
        return writer


def _alike(a: bytes, b: bytes) -> int:
    """Blocks that two prefixes begin with alike. A name is of all tokens up to it: behind one that differs all do."""
    blocks = range(min(len(a), len(b)) // NAME_BYTES)
    return bisect_left(blocks, True, key=lambda i: _name(a, i) != _name(b, i))


def _name(prefix: bytes, i: int) -> bytes:
    return prefix[i * NAME_BYTES : (i + 1) * NAME_BYTES]
