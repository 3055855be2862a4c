"""Names that users write on a command line: here apart, so that it can be checked before JAX is imported."""

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # those that exist; ``dispatch.NAMES`` reserves more
DTYPES = ("bfloat16", "float16", "float32")  # of models, pools and queries
DENSE_GATHER = "dense-gather"  # the baseline of ``bench ops``
