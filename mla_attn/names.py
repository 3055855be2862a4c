"""Names for command lines, in a module without imports, so that arguments are checked before JAX is imported."""

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla", "reference")
DTYPES = ("bfloat16", "float16", "float32")  # dtypes of models, pools and queries
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn:blocks")  # formats of cache rows
DENSE_GATHER = "dense-gather"  # the baseline of ``bench ops``
