"""Exceptions raised where an interrupt can arrive: at every bytecode of the engine at which Python looks for signals.

That is after a call, at a function's begin, and where a loop goes round. So an exception after a call into the device
is met too: its work is done, its result is lost.
"""

import contextlib
import dis
import functools
import pathlib
import sys
from types import CodeType, FrameType

import mla_attn
from mla_attn import buckets, cache

_ROOT = mla_attn.__path__[0]
_PATHS = (f"{_ROOT}/engine", f"{_ROOT}/passes", buckets.__file__, *cache.__path__)
FOLDERS = tuple(str(pathlib.Path(path).resolve()) for path in _PATHS)


@functools.cache
def points(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal's handler can run."""
    if not code.co_filename.startswith(FOLDERS):
        return frozenset()
    found, previous = set(), ""
    for instruction in dis.get_instructions(code):
        if previous.startswith("CALL") or previous == "RESUME":
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        previous = instruction.opname
    return frozenset(found)


class Fault:
    """Counts points as they are passed, and raises ``error`` at the one numbered ``at``, if that is not None."""

    def __init__(self, error: BaseException | None = None, at: int | None = None):
        self.error, self.at, self.passed = error, at, 0

    @contextlib.contextmanager
    def armed(self):
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at this of any frame, in settrace alone
        sys.settrace(self._call)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object):
        if not points(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object):
        # Without a line it is the end of a generator that is let go of: what is raised there goes nowhere.
        if event == "opcode" and frame.f_lasti in points(frame.f_code) and frame.f_lineno is not None:
            self.passed += 1
            if self.passed == self.at:
                assert self.error is not None
                raise self.error
        return self._opcode
