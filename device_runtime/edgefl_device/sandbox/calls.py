"""System calls that a confined process may not make, and the seccomp filter that refuses them.

Sources: include/uapi/linux/seccomp.h, linux/filter.h; call numbers from asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_EPERM, _ENOSYS = 1, 38
_LOAD, _JUMP_EQUAL, _JUMP_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
_NOT_THERE = 0x00050000 | _ENOSYS
_ARGUMENT_0, _ARGUMENT_1 = 16, 24  # the lower halves, on little-endian processors
_THREAD = 0x00010000  # CLONE_THREAD
_X32 = 0x40000000  # the second set of numbers on x86-64

# Each group: name, number on x86-64, number on AArch64. -: the processor lacks the call.
_SOCKETS = """
socket 41 198, connect 42 203, accept 43 202, sendto 44 206, bind 49 200, listen 50 201, socketpair 53 199, accept4 288 242
"""
_PROGRAMS = (
    "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, unshare 272 97, setns 308 268, chroot 161 51"
)
_OTHER_PROCESSES = """
kill 62 129, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, ptrace 101 117, kcmp 312 272,
process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448,
pidfd_send_signal 424 424, pidfd_open 434 434, pidfd_getfd 438 438, migrate_pages 256 238, move_pages 279 239,
setpgid 109 154, setsid 112 157, perf_event_open 298 241
"""
# Other processes' priority and processors; a process can also take more of the machine than its agent left it.
_SCHEDULING = """
sched_setaffinity 203 122, sched_setattr 314 274, sched_setparam 142 118, sched_setscheduler 144 119,
setpriority 141 140, ioprio_set 251 30
"""
# Memory outside of the address space, where no resource limit counts it. Some of it outlives the process.
_MEMORY = """
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, semget 64 190,
semctl 66 191, semop 65 193, semtimedop 220 192, msgget 68 186, msgctl 71 187, msgsnd 69 189, msgrcv 70 188,
mq_open 240 180, mq_unlink 241 181, userfaultfd 323 282, io_uring_setup 425 425, io_setup 206 0
"""
# Landlock lets a process change these of any file that the process can name.
_ATTRIBUTES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, removexattrat 466 466, file_setattr 469 469, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, truncate 76 45
"""
_SYSTEM = """
mount 165 40, umount2 166 39, pivot_root 155 41, mount_setattr 442 442, move_mount 429 429, open_tree 428 428,
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, open_by_handle_at 304 265, fanotify_init 300 262,
quotactl 179 60, quotactl_fd 443 443, add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, acct 163 89,
reboot 169 142, swapon 167 224, swapoff 168 225, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266,
adjtimex 159 171, sethostname 170 161, setdomainname 171 162, init_module 175 105, finit_module 313 273,
delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, syslog 103 116, vhangup 153 58, iopl 172 -, ioperm 173 -,
modify_ldt 154 -, personality 135 92, sync 162 81, syncfs 306 267, inotify_init 253 -, inotify_init1 294 26
"""
_GROUPS = (_SOCKETS, _PROGRAMS, _OTHER_PROCESSES, _SCHEDULING, _MEMORY, _ATTRIBUTES, _SYSTEM)
# TIOCSTI and TIOCLINUX type into a terminal; FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR change attributes of any file.
_REFUSED_IOCTLS = (0x5412, 0x541C, 0x40086602, 0x401C5820)
# F_SETOWN, F_SETSIG and F_SETOWN_EX have the kernel send a signal to any process of the user; F_SETLEASE keeps others from
# opening a file, F_NOTIFY watches a folder, F_SETPIPE_SZ takes memory of the kernel.
_REFUSED_FCNTLS = (8, 10, 15, 1024, 1026, 1031)
_CLONE3 = 435

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class SeccompMachine:
    """Processor architecture as seccomp names it.

    Attributes:
        audit: The kernel's constant for the architecture.
        column: Index of its column in the tables of system call numbers.
        seccomp, clone, prlimit64, tgkill, ioctl, fcntl: Number of the system call of this name.
    """

    audit: int
    column: int
    seccomp: int
    clone: int
    prlimit64: int
    tgkill: int
    ioctl: int
    fcntl: int

    def refused(self) -> tuple[int, ...]:
        """Return the numbers of the system calls that the filter refuses whatever their arguments."""
        rows = (row.split() for group in _GROUPS for row in group.split(","))
        return tuple(int(row[self.column]) for row in rows if row[self.column] != "-")


MACHINES = {
    "x86_64": SeccompMachine(0xC000003E, 1, 317, 56, 302, 234, 16, 72),
    "aarch64": SeccompMachine(0xC00000B7, 2, 277, 220, 261, 131, 29, 25),
}


def filter_program(machine: SeccompMachine) -> bytes:
    """Return the seccomp filter for ``machine`` in the kernel's binary form."""
    return b"".join(struct.pack("=HBBI", *each) for each in _instructions(machine))


def _instructions(machine: SeccompMachine) -> Iterator[Instruction]:
    """Yield the filter's instructions.

    clone3 passes its flags in memory, which a filter cannot read. The filter reports it as missing: libraries then
    use clone.
    """
    yield (_LOAD, 0, 0, 4)  # the processor
    yield (_JUMP_EQUAL, 1, 0, machine.audit)
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, 0)  # the number of the call
    yield (_JUMP_EQUAL, 0, 1, _CLONE3)
    yield (_RETURN, 0, 0, _NOT_THERE)
    yield from _allow_if(machine.clone, _ARGUMENT_0, (_JUMP_BITS, 0, 1, _THREAD))
    # pid 0 is this process. A process's own number is refused too: glibc and musl never pass it here.
    yield from _allow_if(machine.prlimit64, _ARGUMENT_0, (_JUMP_EQUAL, 0, 1, 0))
    yield from _allow_if(machine.tgkill, _ARGUMENT_0, (_JUMP_EQUAL, 0, 1, os.getpid()))  # abort() needs it
    for call, requests in ((machine.ioctl, _REFUSED_IOCTLS), (machine.fcntl, _REFUSED_FCNTLS)):
        for request in requests:
            yield from _refuse_if(call, _ARGUMENT_1, request)
    refused = machine.refused()
    yield (_JUMP_LEAST, len(refused) + 1, 0, _X32)
    yield from ((_JUMP_EQUAL, len(refused) - at, 0, number) for at, number in enumerate(refused))
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _REFUSE)


def _allow_if(call: int, argument: int, test: Instruction) -> Iterator[Instruction]:
    """Yield instructions that allow ``call`` only if its argument passes ``test``. ``argument`` is the argument's
    offset in the kernel's data.
    """
    yield (_JUMP_EQUAL, 0, 4, call)
    yield (_LOAD, 0, 0, argument)
    yield test
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _REFUSE)


def _refuse_if(call: int, argument: int, value: int) -> Iterator[Instruction]:
    """Yield instructions that refuse ``call`` if its argument is ``value``, and else load the call's number again.

    ``argument`` is the argument's offset in the kernel's data.
    """
    yield (_JUMP_EQUAL, 0, 4, call)
    yield (_LOAD, 0, 0, argument)
    yield (_JUMP_EQUAL, 0, 1, value)
    yield (_RETURN, 0, 0, _REFUSE)
    yield (_LOAD, 0, 0, 0)
