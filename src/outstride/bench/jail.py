"""Runs one program under limits that it cannot lift. This script is started in a process of its own.

It takes three numbers (seconds, bytes of memory, the file descriptor for its result) and reads the
program from standard input. Before the program runs, a seccomp filter restricts the process to a
short list of system calls that read, wait and compute: no socket, no fork, no exec, no signal, and
files are opened for reading only. Resource limits bound the rest. It uses only the standard library
and nothing of this project.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys

_X86_64 = (
    *(0, 1, 3, 4, 5, 6, 7, 8),  # read write close stat fstat lstat poll lseek
    *(
        9,
        10,
        11,
        12,
        13,
        14,
        15,
    ),  # mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
    *(17, 19, 20, 21, 23, 24),  # pread64 readv writev access select sched_yield
    *(25, 28, 32, 35, 39, 60),  # mremap madvise dup nanosleep getpid exit
    *(63, 79, 89, 96, 98),  # uname getcwd readlink gettimeofday getrusage
    *(99, 100, 102, 104, 107, 108, 110),  # sysinfo times getuid getgid geteuid getegid getppid
    *(131, 186, 201, 202),  # sigaltstack gettid time futex
    *(204, 217, 228, 229),  # sched_getaffinity getdents64 clock_gettime clock_getres
    *(230, 231, 262, 267),  # clock_nanosleep exit_group newfstatat readlinkat
    *(269, 270, 271, 318, 332, 439),  # faccessat pselect6 ppoll getrandom statx faccessat2
)
_AARCH64 = (
    *(17, 23, 48, 57, 61, 62),  # getcwd dup faccessat close getdents64 lseek
    *(63, 64, 65, 66, 67, 72, 73),  # read write readv writev pread64 pselect6 ppoll
    *(78, 79, 80, 93, 94),  # readlinkat newfstatat fstat exit exit_group
    *(98, 101, 113, 114, 115),  # futex nanosleep clock_gettime clock_getres clock_nanosleep
    *(123, 124, 132, 134),  # sched_getaffinity sched_yield sigaltstack rt_sigaction
    *(135, 139, 153, 160, 165),  # rt_sigprocmask rt_sigreturn times uname getrusage
    *(169, 172, 173, 174),  # gettimeofday getpid getppid getuid
    *(175, 176, 177, 178, 179),  # geteuid getgid getegid gettid sysinfo
    *(214, 215, 216, 222, 226),  # brk munmap mremap mmap mprotect
    *(233, 278, 291, 439),  # madvise getrandom statx faccessat2
)
_ALLOWED = {
    "x86_64": (0xC000003E, _X86_64, {257: 2, 2: 1}),  # openat and open: where the flags are
    "aarch64": (0xC00000B7, _AARCH64, {56: 2}),
}
"""By machine: the audit architecture, calls that are always allowed, and calls that open files."""
_READ_ONLY = 0o2000000 | 0o100000 | 0o200000 | 0o4000 | 0o400000
"""Flags that are allowed when opening: close-on-exec, large file, directory, non-blocking,
no-follow.
"""
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_USER, _NETWORK, _IPC = 0x10000000, 0x40000000, 0x08000000


class _Instruction(ctypes.Structure):
    """One instruction of the BPF filter."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _FilterProgram(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint16),
        ("lines", ctypes.POINTER(_Instruction)),
    ]


def supported() -> bool:
    """Whether a system call filter can be installed on this machine."""
    return sys.platform == "linux" and platform.machine() in _ALLOWED and sys.byteorder == "little"


def filter_lines(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter for a machine: (instruction, lines to skip if true, if false, value)."""
    kernel, free, opening = _ALLOWED[machine]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, kernel), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in free:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, place in opening.items():
        # The lower half of an argument lies at 16 + 8 * place; none of the other flags may be set.
        lines += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, 16 + 8 * place),
            (_ANY, 1, 0, 0xFFFFFFFF & ~_READ_ONLY),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    return [*lines, (_RETURN, 0, 0, _REFUSE)]


def _limit(seconds: int, memory: int) -> None:
    """Sets resource limits, which the process cannot raise again."""
    for what, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def confine(seconds: int, memory: int) -> None:
    """Confines this process. Raises OSError if the kernel rejects the filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(
        _USER | _NETWORK | _IPC
    )  # additional isolation where permitted; the filter suffices
    _limit(seconds, memory)
    lines = filter_lines(platform.machine())
    array = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _FilterProgram(len(lines), array)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel rejects the system call filter")


def main() -> None:
    """Runs the program and writes to the given descriptor how it ended."""
    seconds, memory, descriptor = (int(word) for word in sys.argv[1:4])
    source = sys.stdin.buffer.read().decode("utf-8")
    try:
        confine(seconds, memory)
    except OSError as error:
        os.write(descriptor, f"open {error}".encode())
        os._exit(3)
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
        message = "done"
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"[:300]
    os.write(descriptor, message.encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    main()
