"""Checks that the paged ops share."""


def check_pool(pool, spec, metadata) -> None:
    pool.check()
    if metadata.page_size not in (None, pool.page_size):
        raise ValueError(
            f"metadata was built with page_size={metadata.page_size}, but the pool has page_size={pool.page_size}"
        )
    if (pool.kv_lora_rank, pool.latent_dim) != (spec.kv_lora_rank, spec.latent_dim):
        raise ValueError(
            f"pool stores {pool.kv_lora_rank} latent + {pool.rope_dim} rope channels per token, "
            f"but spec has {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
        )
