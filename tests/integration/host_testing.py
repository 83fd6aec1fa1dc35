"""Hosts with something missing: what a command is started under so that it meets them. As root only."""

import ctypes
import os
import shutil
import struct
import unittest


def require_root(*tools):
    """Skips the test where the host cannot be crippled."""
    if os.geteuid() != 0:
        raise unittest.SkipTest("needs root, to make namespaces")
    for tool in tools:
        if shutil.which(tool) is None:
            raise unittest.SkipTest(f"needs {tool}")


def mounting(*mounts):
    """Words that run a command in a mount namespace of its own, after these shell commands."""
    script = " && ".join(["mount --make-rprivate /", *mounts, 'exec "$0" "$@"'])
    return ("unshare", "-m", "sh", "-c", script)


# ---- system calls that fail ----------------------------------------------------------------------------------------------

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
PROCESS_VM_READV, PROCESS_VM_WRITEV = (310, 311) if os.uname().machine == "x86_64" else (270, 271)


def failing_calls(numbers, error):
    """For subprocess's preexec_fn: from then on these system calls of the process and its children return `error`."""

    def install():
        program = [(_LOAD, 0, 0, 0)]
        for index, number in enumerate(numbers):
            program.append((_EQUAL, len(numbers) - index, 0, number))
        program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

        filter_ = Program(len(program), ctypes.addressof(code))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")

    return install
