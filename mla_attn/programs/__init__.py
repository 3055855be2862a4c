"""Programs that outlive their process: step functions, lowered once and kept in a folder.

To trace and lower a whole model takes about a second of Python for each program; to read what came of it, a tenth.
What is kept is the program before XLA compiles it (StableHLO, kernels included, as ``jax.export`` serialises it): data,
which no pickle and no loader of machine code has to read. Compiled executables are code, and what loads them trusts
them; they are left to JAX's own compilation cache, below the same folder.
"""

from mla_attn.programs.folder import Folder, open_folder
from mla_attn.programs.naming import Unknown, identity
from mla_attn.programs.step import Step

__all__ = ["Folder", "Step", "Unknown", "identity", "open_folder"]
