"""A folder of programs on disk. Files that cannot be used are treated as missing, so that they never cause an error."""

import hashlib
import logging
import os
import pathlib
import platform
import tempfile

import jax

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "MLA_ATTN_CACHE_DIR"
_MAGIC = b"mla_attn program 1\n"
_SUFFIX = ".program"
_LEAST_SECONDS = 0.1  # compile time from which JAX's compilation cache keeps a program; JAX's default is 1


def default_folder() -> str:
    """The path of ``open_folder(None)``; it may be empty."""
    if (named := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return named
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "mla_attn")


class Folder:
    """Programs as files, each under its name (``identity``), preceded by a digest of name and content.

    Several processes may read and write at the same time: files appear atomically, and a name determines the content.

    Attributes:
        path: the folder, which is created when the first program is written.
        read: programs read so far.
        written: programs written so far.
        bytes: bytes of the programs read and written.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).expanduser()
        self.read = self.written = self.bytes = 0
        self._writable = True

    def load(self, name: str) -> bytes | None:
        """The program of that name; None if there is none, or its file is damaged."""
        try:
            data = self._file(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, its program is lowered again: %s", self._file(name), error)
            return None
        head, program = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
        if head != _head(name, program):
            logger.warning("%s is damaged, its program is lowered again", self._file(name))
            return None
        self.read += 1
        self.bytes += len(data)
        return program

    def store(self, name: str, program: bytes) -> None:
        """Stores a program. If the folder cannot be written, this is logged once."""
        if not self._writable:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=name[:8])
            try:
                with open(descriptor, "wb") as file:
                    file.write(_head(name, program) + program)
                os.replace(temporary, self._file(name))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            self._writable = False
            logger.warning("programs are not kept: %s", error)
            return
        self.written += 1
        self.bytes += len(_MAGIC) + 32 + len(program)

    def __contains__(self, name: str) -> bool:
        return self._file(name).exists()

    def size(self) -> int:
        """Bytes of all files in it, JAX's compiled programs included."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _file(self, name: str) -> pathlib.Path:
        return self.path / f"{name}{_SUFFIX}"


def _head(name: str, program: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(name.encode() + program).digest()


def open_folder(path: str | os.PathLike | None) -> Folder | None:
    """Opens the folder of programs at ``path``; returns None if that is empty.

    From now on this process also stores programs compiled by XLA, in a subfolder, unless JAX's compilation cache
    already has a folder (``JAX_COMPILATION_CACHE_DIR``) or is disabled. JAX trusts the files there: anyone who can
    write to the folder can run code as the user of this process.

    Args:
        path: a folder, which need not exist; None for that of ``MLA_ATTN_CACHE_DIR``, else ``mla_attn`` in the user's
            cache folder (``XDG_CACHE_HOME``, or ``~/.cache``).
    """
    path = default_folder() if path is None else os.fspath(path)
    if not path:
        return None
    folder = Folder(path)
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        # One subfolder per CPU, because JAX does not distinguish CPUs with different instructions.
        kind = f"cpu-{_cpu()}" if jax.default_backend() == "cpu" else jax.default_backend()
        jax.config.update("jax_compilation_cache_dir", str(folder.path / "xla" / kind))
        if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    return folder


def _cpu() -> str:
    """A short digest of this machine's processor model and features."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        facts = [platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *facts]).encode()).hexdigest()[:8]
