"""Tree masks packed to bits, the form in which the kernels read them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

BITS = 32  # keys per word


def tree_words(
    tree_mask: Bool[Array, "B S M"], request: Int[Array, "T"], row: Int[Array, "T"], *, heads: int, extra_rows: int
) -> Int32[Array, "words rows"]:
    """Packs a mask: bit ``c % 32`` of ``words[c // 32, t * heads + h]`` is ``tree_mask[request[t], row[t], c]``.

    Args:
        tree_mask: which of the last M keys each row sees.
        request: request of each query token.
        row: row of each query token within its request.
        heads: packed rows of a query token, all with the same bits.
        extra_rows: rows of zeros after the last: kernels read whole row tiles.
    """
    keys = tree_mask.shape[2]
    words = -(-keys // BITS)
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, words * BITS - keys))).reshape(*tree_mask.shape[:2], words, BITS)
    shifts = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 3)
    packed = (bits.astype(jnp.uint32) << shifts).sum(axis=-1, dtype=jnp.uint32)
    packed = jax.lax.bitcast_convert_type(packed[request, row], jnp.int32)  # [T, words]
    return jnp.pad(jnp.repeat(packed.T, heads, axis=1), ((0, 0), (0, extra_rows)))
