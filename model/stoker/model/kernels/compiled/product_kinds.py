"""What the products in C take, by the processor's instructions.

Pure. D input size, E output size.
"""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """The limits of one way to multiply."""

    most_rows: int | None
    """None: any number."""
    in_multiple: int
    """D is a multiple of it."""
    out_multiple: int
    """E is a multiple of it."""
    has_blocks: bool
    """Whether all blocks of a pass run as one call, prompts' attention included, which was measured there."""

    def divides(self, out_size: int, in_size: int) -> bool:
        """Whether a weight [E, D] has sizes that the product takes."""
        return out_size % self.out_multiple == 0 and in_size % self.in_multiple == 0

    def takes(self, num_rows: int) -> bool:
        return 0 < num_rows <= (self.most_rows or num_rows)


PRODUCTS: dict[int, Product | None] = {
    0: None,
    1: Product(most_rows=64, in_multiple=32, out_multiple=32, has_blocks=False),
    2: Product(most_rows=None, in_multiple=16, out_multiple=1, has_blocks=True),
}
"""By the number that `stoker_product_kind` returns (`products.c`): none; AMX, of few rows, because oneDNN, which puts a
weight in order first, is faster for more; AVX2 without AVX-512, where oneDNN has no product in bfloat16."""
