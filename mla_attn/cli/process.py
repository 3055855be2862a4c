"""Setup of the process: signals, streams, and the start of JAX."""

import os
import signal
import sys

from mla_attn.text import line


def own() -> None:
    """Makes the process behave as a shell expects.

    Ctrl-C and a closed pipe (``| head``) end the process at once and silently; Python's own handlers would wait until
    XLA has finished compiling. Closed standard streams are replaced by the null device, and characters that the
    terminal's encoding lacks are printed as question marks.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # keep it ignored if the parent ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # otherwise the next opened file could become stderr
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def start_jax() -> None:
    """Imports JAX and starts its backend.

    Raises:
        ValueError: JAX finds no device of the platform that ``JAX_PLATFORMS`` names.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax 0.11 asserts that a named platform exists
        asked = os.environ.get("JAX_PLATFORMS")
        reason = line(str(error), 300) or "JAX finds no such device"
        raise ValueError(f"JAX_PLATFORMS={asked!r}: {reason}" if asked else f"JAX does not start: {reason}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that XLA ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
