"""Position-dependent scaling of queries."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_attn.checks import INT32_MAX, check_integer, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Scaling of queries by their position, as in Llama 4, which sharpens attention over long contexts.

    A query at position p is multiplied by ``1 + beta * ln(1 + floor(p / original_max_position))``.
    """

    beta: float
    original_max_position: int

    def __post_init__(self):
        object.__setattr__(self, "beta", check_number("beta", self.beta))
        most = check_integer("original_max_position", self.original_max_position, 1, INT32_MAX)
        object.__setattr__(self, "original_max_position", most)

    def factors(self, positions: Int[Array, "T"]) -> Float[Array, "T"]:
        """float32 factor of each row."""
        return 1.0 + self.beta * jnp.log1p((positions // self.original_max_position).astype(jnp.float32))


def scaled(q: Float[Array, "T H D"], metadata, query_scaling: QueryScaling | None) -> Float[Array, "T H D"]:
    """Scales queries by the positions of their rows; returns them as they are if ``query_scaling`` is None.

    Raises:
        ValueError: the queries are float8 already.
    """
    if query_scaling is None:
        return q
    if q.dtype == jnp.float8_e4m3fn:
        raise ValueError("query_scaling with float8_e4m3fn queries: must be None, it comes before quantize_queries")
    factors = query_scaling.factors(metadata.positions)[:, None, None]
    return (q.astype(jnp.float32) * factors).astype(q.dtype)
