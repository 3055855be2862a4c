"""What a program owes the shell that runs it: signals, streams, and one line where JAX cannot start."""

import os
import signal
import sys

from mla_attn.text import line


def own() -> None:
    """Make the process behave as a shell expects.

    Ctrl-C, and a reader that leaves (``| head``), end it at once and without a word, whatever it does: Python's own
    handlers wait until XLA has compiled. Closed streams lead nowhere, and what a terminal's encoding does not have is
    shown as a question mark.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a parent has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # or the next file opened would get what stderr writes
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def start_jax() -> None:
    """Import JAX and start its backend.

    Raises:
        ValueError: JAX finds no device of the kind that ``JAX_PLATFORMS`` asks for.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax 0.11 asserts that a platform asked for is there
        asked = os.environ.get("JAX_PLATFORMS")
        reason = line(str(error), 300) or "JAX finds no such device"
        raise ValueError(f"JAX_PLATFORMS={asked!r}: {reason}" if asked else f"JAX does not start: {reason}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether XLA says that there was no memory for something."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
