# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# (It changes a part of JAX that JAX keeps to itself.)
"""What is changed in JAX itself: how its layout inference names values, in the versions where that takes long.

The solver sorts values by name, and ``ValueSite.__str__`` makes a name by printing the operation that a value hangs on,
with its whole body, for which MLIR first numbers every value of the kernel. It is a third of what lowering our kernels
takes. Here a name is the operation's number in the kernel: as unique, and an order as fixed. Kernels of others keep
theirs, and other versions of JAX stay as they are.
"""

import functools
import threading

import jax

KERNELS = (
    "gqa_decode",
    "gqa_stream",
    "mla_decode",
    "mla_stream",
    "mla_float8",
    "mla_combine",
    "grouped_matmul",
    "ragged_prefill",
)
VERSIONS = ("0.11.2",)  # those whose layouts were seen to be the same with either name

_own = threading.local()  # numbers: of the operations of the kernel that this thread infers layouts for


def install() -> None:
    """Gives values short names while layouts of our kernels are inferred, if this version of JAX is known."""
    if jax.__version__ not in VERSIONS:
        return
    from jax.experimental.mosaic.gpu import layout_inference

    if not hasattr(layout_inference.infer_layout, "__wrapped__"):
        layout_inference.infer_layout = _with_numbers(layout_inference.infer_layout)
        layout_inference.ValueSite.__str__ = _short(layout_inference.ValueSite.__str__)


def _with_numbers(infer_layout):
    from jax._src.lib.mlir import ir

    @functools.wraps(infer_layout)
    def infer(module, **options):
        attributes = module.operation.attributes
        if "sym_name" not in attributes or ir.StringAttr(attributes["sym_name"]).value not in KERNELS:
            return infer_layout(module, **options)
        numbers = _own.numbers = {}

        def number(operation):
            numbers[operation.operation] = len(numbers)
            return ir.WalkResult.ADVANCE

        module.operation.walk(number, ir.WalkOrder.PRE_ORDER)
        try:
            return infer_layout(module, **options)
        finally:
            del _own.numbers

    return infer


def _short(name):
    @functools.wraps(name)
    def short(site):
        number = getattr(_own, "numbers", {}).get(site.operation.operation)
        return name(site) if number is None else f"{number:06}:{site.type.name}-{site.index}"

    return short
