"""Programs on disk: step functions that are lowered once and kept in a folder for other processes.

Tracing and lowering a whole model takes about a second of Python per program; reading the result takes a tenth. The
folder has programs before XLA compiles them (StableHLO with kernels, serialised by ``jax.export``). They are data, read
without pickle and without loading machine code. Compiled executables are code, and their loader trusts them; they are
left to JAX's own compilation cache, in a subfolder.
"""

from mla_attn.programs.folder import Folder, open_folder
from mla_attn.programs.naming import Unknown, identity
from mla_attn.programs.step import Step

__all__ = ["Folder", "Step", "Unknown", "identity", "open_folder"]
